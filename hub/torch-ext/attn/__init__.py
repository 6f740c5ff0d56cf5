# SPDX-License-Identifier: Apache-2.0
"""sinkattn as a kernel of Hugging Face's hub: flash-attention's functions, which take learned sinks as s_aux.

It compiles nothing: the functions are those of the sinkattn that is installed, for that environment's torch.
"""

try:
    from sinkattn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
except ModuleNotFoundError as error:
    if error.name != "sinkattn":
        raise
    raise ModuleNotFoundError(
        "sinkattn: the hub kernel calls the package sinkattn, which is not installed here:"
        " pip install --no-build-isolation . in sinkattn's folder",
        name="sinkattn",
    ) from error

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
