"""A light reader of C++ and CUDA sources: four idioms, matched after comments are removed.

It doesn't follow calls, so what it finds is ``"matched"`` and not ``"followed"``:

* ``ggml_concat(ctx, first, second, 0)`` of the two parts (llama.cpp);
* a call for each part whose last argument is the column, as in
  ``copy(kv_c, ..., 0); copy(k_pe, ..., kv_lora_rank);`` (vLLM);
* a pointer to the rope part made from one to the latent part plus the latent's width, as in
  ``output_rope = offset(output_nope, kNopeBytes)`` (SGLang's CUDA), or the reverse;
* a value tensor that begins where the key's does: ``vcache = ... : kcache`` or
  ``sV = make_tensor(sK.data(), ...)`` (FlashMLA).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .symbols import ZERO, L, Part, R, Site, meaning, order_at, window_text

_COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])+'", re.S)
_CALL = re.compile(r"(?:(?P<target>\w+)\s*=\s*)?(?P<callee>[\w:.>-]*\w)\s*"
                   r"\((?P<arguments>[^(){};]*)\)")
_SAME_BASE = re.compile(r"\bvcache\s*=\s*(?:[^;]*:\s*)?kcache\s*;|"
                        r"\bsV\s*=\s*make_tensor\(sK\.data\(\)\s*,")
_WIDTHS = {"kNopeBytes": L, "kRopeBytes": R, "kNopeDim": L, "kRopeDim": R, "0": ZERO}


def without_comments(text: str) -> str:
    """C++ with comments and strings blanked; every line keeps its number."""
    return _COMMENT_OR_STRING.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def sites(file: str, text: str) -> Iterator[Site]:
    """Where the order of a cache row shows in a C++ or CUDA source."""
    code = without_comments(text)
    for match in _SAME_BASE.finditer(code):
        line = code.count("\n", 0, match.start()) + 1
        yield Site("value", "latent_first", file, line, f"latent = {window_text(ZERO, L)}",
                   "matched")
    for match in _CALL.finditer(code):
        arguments = [a.strip() for a in match["arguments"].split(",")]
        parts = [_part(a) for a in arguments]
        callee, target = match["callee"].split("::")[-1], match["target"]
        at = _WIDTHS.get(arguments[-1]) or meaning(arguments[-1])
        found = None
        # In llama.cpp k_nope is a head's unpacked key, which the MLA cache never sees.
        if callee == "ggml_concat" and {*parts[1:3]} == {"latent", "rope"} and not any(
                "nope" in a for a in arguments):
            found = f"row = cat({parts[1]}, {parts[2]})", order_at(parts[1], ZERO)
        elif target is None and parts[0] and at in (ZERO, L, R) and any(
                "cache" in a for a in arguments[1:]):
            found = _placed(parts[0], at)
        elif target and callee == "offset" and at in (L, R) and _part(target):
            found = _placed(_part(target), at)
        if found:
            line = code.count("\n", 0, match.start("callee")) + 1
            yield Site("write", found[1], file, line, found[0], "matched")


def _placed(part: str, at) -> tuple[str, str | None]:
    stop = at.plus(L if part == "latent" else R)
    return f"{window_text(at, stop)} = {part}", order_at(part, at)


def _part(name: str) -> str | None:
    """The part that a variable holds. A query's (``q_pe``) is none of the cache's."""
    known = meaning(name) if re.fullmatch(r"\w+", name) else None
    return known.name if isinstance(known, Part) else None
