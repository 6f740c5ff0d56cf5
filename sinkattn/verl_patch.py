# SPDX-License-Identifier: Apache-2.0
"""sinkattn as the attention of models that verl trains.

Importing verl, also in its Ray workers, imports this module, and that applies it; one override then selects it:

    +actor_rollout_ref.model.override_config.attn_implementation=sinkattn      (SFT: +model.override_config...)

verl writes the name into the config.json of its checkpoints, and transformers refuses to load them where sinkattn is
not registered. `python -m sinkattn.verl_patch FOLDER...` takes it out.

Not covered: verl's critic, which asks for flash_attention_2 whatever the override says, and Ulysses sequence
parallelism, which raises in the first forward.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

TESTED_VERL = ("0.9.1",)

_replaced: list[tuple[dict[str, Any], Any]] = []  # a registry of transformers, what it held under the name or None


def apply() -> None:
    """Register sinkattn with the transformers that verl uses; a second call changes nothing.

    Raises ImportError without verl or with too old a transformers, NotImplementedError for an untested verl.
    """
    import verl

    if verl.__version__ not in TESTED_VERL:
        raise NotImplementedError(
            f"sinkattn: verl is {verl.__version__}; tested are {', '.join(TESTED_VERL)}. For another, check what its"
            " attention is handed, then call sinkattn.hf.register() yourself"
        )
    import transformers

    from sinkattn import hf

    if _replaced:
        return
    # What register() writes to; transformers has no public way to take a name out.
    registries = (
        transformers.AttentionInterface._global_mapping,
        transformers.AttentionMaskInterface._global_mapping,
    )
    before: list[tuple[dict[str, Any], Any]] = [(registry, registry.get(hf.NAME)) for registry in registries]
    hf.register()
    _replaced.extend(before)


def remove() -> None:
    """Undo apply(): what it registered is again what it was before, or unknown; without apply(), do nothing."""
    while _replaced:
        registry, before = _replaced.pop()
        if before is None:
            del registry["sinkattn"]
        else:
            registry["sinkattn"] = before


def clean_checkpoint(folder: str | Path) -> bool:
    """Take attn_implementation "sinkattn" out of the config.json of a folder; whether it was there.

    Raises OSError when there is no config.json to read and write.
    """
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # A model of several parts has a config for each, one level down.
    named = [
        x for x in (config, *config.values()) if isinstance(x, dict) and x.get("attn_implementation") == "sinkattn"
    ]
    for part in named:
        del part["attn_implementation"]
    if named:
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return bool(named)


if __name__ == "__main__":
    for folder in sys.argv[1:] or sys.exit("usage: python -m sinkattn.verl_patch FOLDER..."):
        print(f"{folder}: {'cleaned' if clean_checkpoint(folder) else 'nothing to clean'}")
elif "verl" in sys.modules:
    try:
        apply()
    except Exception as error:  # verl drops what a plugin raises without a word
        logging.getLogger(__name__).error("sinkattn is not available to verl: %s", error)
