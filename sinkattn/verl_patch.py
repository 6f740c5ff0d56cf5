# SPDX-License-Identifier: Apache-2.0
"""sinkattn as the attention of models that verl trains; docs/verl.md is the guide.

Importing verl, also in its Ray workers, imports this module, and that applies it; one override then selects it:

    +actor_rollout_ref.model.override_config.attn_implementation=sinkattn      (SFT: +model.override_config...)

A model that goes on asking for another attention, as verl's critic does, gets sinkattn only where that is asked for:

    SINKATTN_VERL_REPLACE=flash_attention_2      in the environment of every worker; or replace("flash_attention_2")

Under verl's Ulysses sequence parallelism attention_forward trades heads for the rest of the sequence itself.

verl writes the override into the config.json of its checkpoints, and transformers refuses to load them where sinkattn
is not registered. `python -m sinkattn.verl_patch FOLDER...` takes it out.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sinkattn.hf_masks import SEQUENCES, WHOLE, is_encoded_mask

TESTED_VERL = ("0.9.1",)
# Where verl keeps a model's config.json below a checkpoint's folder: an SFT step, a PPO step's actor and critic.
MODEL_FOLDERS = ("huggingface", "actor/huggingface", "critic/huggingface")

_logger = logging.getLogger(__name__)
_undo: list[Callable[[], None]] = []


def apply(*, invariant: bool | None = None) -> None:
    """Register sinkattn with the transformers that verl uses, again where hf.register() came between.

    invariant is that of hf.register(): None keeps what was said there, before or after.

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

    # What register() writes to; transformers has no public way to take a name out.
    registries = (transformers.AttentionInterface._global_mapping, transformers.AttentionMaskInterface._global_mapping)
    before = [(registry, registry.get(hf.NAME)) for registry in registries]
    hf.register(invariant=invariant)
    hf.register_attention(attention_forward, None)
    if _undo:  # knows already what was there before
        return

    def restore() -> None:
        for registry, function in before:
            if function is None:
                del registry[hf.NAME]
            else:
                registry[hf.NAME] = function

    _undo.append(restore)


def replace(*names: str) -> None:
    """apply(), and give sinkattn to each model made from now on that asks transformers for one of these attentions.

    Raises ValueError for a name that transformers does not know, and what apply() raises.
    """
    apply()
    from transformers import AttentionInterface, PreTrainedModel

    known = sorted(AttentionInterface._global_mapping)
    unknown = sorted(set(names) - set(known))
    if unknown or not names:
        raise ValueError(
            f"sinkattn: {unknown or 'nothing'} is to be replaced, which transformers does not know; it knows"
            f" {', '.join(known)}. Models keep the attention that they ask for"
        )
    # Where a model, before anything else, looks for flash-attention or a hub's kernel of that name.
    method = "_check_and_adjust_attn_implementation"
    check = getattr(PreTrainedModel, method)

    def check_replaced(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation in names:
            attn_implementation = "sinkattn"
        return str(check(self, attn_implementation, *args, **kwargs))

    setattr(PreTrainedModel, method, check_replaced)
    _undo.append(lambda: setattr(PreTrainedModel, method, check))
    _logger.warning("models that ask for %s get sinkattn", " or ".join(names))


def remove() -> None:
    """Undo apply() and replace(): transformers is again what it was before; without them, do nothing.

    verl itself is never changed.
    """
    while _undo:
        _undo.pop()()


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """sinkattn.hf.attention_forward, also where verl has cut the sequence over the ranks of its Ulysses group.

    There query is [1, num_q_heads, tokens / ranks, head_dim], key and value likewise, position_ids [1, tokens / ranks],
    s_aux whole. Each rank computes its share of the heads over all tokens; the gradient of s_aux is zero outside of it,
    so that the ranks' sum is the gradient.

    Raises what hf.attention_forward raises, NotImplementedError for what cannot be shared out.
    """
    from sinkattn import hf

    ulysses = sys.modules.get("verl.utils.ulysses")
    size = 1 if ulysses is None else ulysses.get_ulysses_sequence_parallel_world_size()
    if ulysses is None or size == 1:
        kwargs |= {"s_aux": s_aux, "position_ids": position_ids}
        return hf.attention_forward(module, query, key, value, attention_mask, **kwargs)

    causal, window = hf.read_layer(module, attention_mask, kwargs.get("sliding_window"), kwargs.get("is_causal"))
    kwargs |= {"sliding_window": window, "is_causal": causal}
    made = attention_mask
    if made is not None and is_encoded_mask(made) and made.dtype in (WHOLE, SEQUENCES):  # of this rank's part alone
        attention_mask = None
    _refuse_unshared(size, query, key, attention_mask, s_aux, position_ids, kwargs)
    assert position_ids is not None
    if size > key.shape[1]:  # ranks that share a kv head each get it
        key, value = (x.repeat_interleave(size // key.shape[1], dim=1) for x in (key, value))
    # [1, len, heads, head_dim], as the kernels like it
    query, key, value = (
        ulysses.gather_seq_scatter_heads(x.transpose(1, 2), seq_dim=1, head_dim=2).transpose(1, 2)
        for x in (query, key, value)
    )
    if s_aux is not None:
        s_aux = s_aux.chunk(size)[ulysses.get_ulysses_sequence_parallel_rank()]
    kwargs |= {"s_aux": s_aux, "position_ids": _all_position_ids(position_ids, made, ulysses), "whole_sequence": True}
    out, _ = hf.attention_forward(module, query, key, value, None, **kwargs)
    return ulysses.gather_heads_scatter_seq(out, head_dim=2, seq_dim=1), None


def _refuse_unshared(
    size: int,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None,
    position_ids: Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    where = f"under verl's ulysses_sequence_parallel_size, {size},"
    batch, num_q_heads, q_len = query.shape[:3]
    num_kv_heads, k_len = key.shape[1:3]
    if num_q_heads % size or max(size, num_kv_heads) % min(size, num_kv_heads):
        raise NotImplementedError(
            f"sinkattn: {where} the model has {num_q_heads}:{num_kv_heads} heads; the size must divide the query heads,"
            " and divide the key heads or be a multiple of them"
        )
    if s_aux is not None and s_aux.shape != (num_q_heads,):  # None is hf's to judge
        raise ValueError(
            f"sinkattn: {where} s_aux has shape {tuple(s_aux.shape)} and query {num_q_heads} heads; it must hold one"
            " logit a head, for all ranks"
        )
    if attention_mask is not None or batch != 1:
        raise NotImplementedError(
            f"sinkattn: {where} the batch is {batch} with{'out' if attention_mask is None else ''} an attention_mask;"
            " set the model's use_remove_padding to True, which packs it into one row"
        )
    if q_len != k_len:
        raise NotImplementedError(
            f"sinkattn: {where} there are {q_len} queries and {k_len} keys; a cache is not shared out: generate outside"
        )
    if position_ids is None or position_ids.shape != (1, q_len):
        got = None if position_ids is None else tuple(position_ids.shape)
        raise NotImplementedError(
            f"sinkattn: {where} position_ids has shape {got}; only they tell where a sequence begins: [1, {q_len}]"
        )
    bounds = sorted(name for name, x in kwargs.items() if name.startswith("cu_seq_lens") and x is not None)
    if bounds:
        raise NotImplementedError(f"sinkattn: {where} {bounds} do not say of which part they are; pass position_ids")


# A mask that the model made -> the state and position_ids that were gathered beside it, and all ranks' [1, tokens].
_gathered: MutableMapping[Tensor, tuple[tuple[Any, ...], Tensor, Tensor]] = WeakIdKeyDictionary()


def _all_position_ids(position_ids: Tensor, made: Tensor | None, ulysses: Any) -> Tensor:
    """All ranks' position_ids [1, tokens], gathered once for the mask `made` and kept as long as it.

    Kept by the tensor, not by the forward: a checkpoint's second run finds them, and no rank waits there for another.
    """
    from sinkattn import hf

    state = (hf.version(position_ids), ulysses.get_ulysses_sequence_parallel_group())
    kept = None if made is None else _gathered.get(made)
    if kept is None or kept[0] != state or kept[1] is not position_ids:
        kept = state, position_ids, ulysses.all_gather_tensor(position_ids.contiguous()).view(1, -1)
        if made is not None and is_encoded_mask(made):
            _gathered[made] = kept
    return kept[2]


def clean_checkpoint(folder: str | Path) -> bool:
    """Take attn_implementation "sinkattn" out of each config.json of a checkpoint; whether it was in one.

    folder is a model's own, or verl's global_step_N. Raises OSError when there is no config.json to read and write,
    ValueError when one is not JSON.
    """
    cleaned = [_clean(path) for path in _configs(Path(folder))]
    return any(cleaned)


def _configs(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise NotADirectoryError(f"sinkattn: {folder} is not a folder")
    found = [path for place in ("", *MODEL_FOLDERS) if (path := folder / place / "config.json").is_file()]
    if not found:
        raise FileNotFoundError(
            f"sinkattn: {folder} has no config.json, nor has its {'/, '.join(MODEL_FOLDERS)}/; give a model's folder"
            " or one of verl's global_step_N"
        )
    return found


def _clean(path: Path) -> bool:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"sinkattn: {path} is not JSON: {error}") from error
    # A model of several parts has a config for each, one level down.
    named = [
        x for x in (config, *config.values()) if isinstance(x, dict) and x.get("attn_implementation") == "sinkattn"
    ]
    for part in named:
        del part["attn_implementation"]
    if named:
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return bool(named)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m sinkattn.verl_patch",
        description="Takes sinkattn's name out of the config.json of checkpoints that verl wrote, so that they load"
        " where sinkattn is not registered. Nothing else in them changes.",
        epilog=f"In a global_step_N the models of {', '.join(MODEL_FOLDERS)} are cleaned.",
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a model's folder, or one of verl's global_step_N")
    code = 0
    for folder in parser.parse_args(arguments).folders:
        try:
            for path in _configs(Path(folder)):
                print(f"{path}: {'cleaned' if _clean(path) else 'nothing to clean'}")
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            code = 1
    return code


def _load() -> None:
    """What importing this module does beside verl, which silently drops errors that a plugin raises."""
    try:
        apply()
    except Exception as error:
        _logger.error("sinkattn is not available to verl: %s", error)
        return
    if names := os.environ.get("SINKATTN_VERL_REPLACE"):
        try:
            replace(*(name.strip() for name in names.split(",")))
        except Exception as error:
            _logger.error("SINKATTN_VERL_REPLACE is %s and has no effect: %s", names, error)


if __name__ == "__main__":
    sys.exit(main())
elif "verl" in sys.modules:
    _load()
