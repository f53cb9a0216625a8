"""``python -m mla_kernels.evidence``: a verdict in a terminal.

Exit status: 0 an order was found, 1 cannot tell, 2 the witnesses disagree or the input is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import engines, numeric, sglang, source, tree
from .verdict import OrderUnknown, Testimony, judge


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mla_kernels.evidence",
        description="Which order do the rows of an engine's MLA cache have?")
    parser.add_argument("engine", nargs="?", help="sglang, vllm, or a name for the report "
                        "(default: sglang, unless --path, --wheel or --captured is given)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--path", help="a source tree or file, instead of the installed package")
    where.add_argument("--wheel", help="a wheel, instead of the installed package")
    parser.add_argument("--captured", help="q, rows, out in a .npz, .pt or .safetensors file")
    parser.add_argument("--version", default="", help="of a source tree, for the report")
    parser.add_argument("--record", action="store_true",
                        help=f"write what was found to {engines.ENGINES_RECORD.parent}")
    args = parser.parse_args(argv)
    if args.record and not args.engine:
        parser.error("--record needs the engine's name")
    try:
        return run(args)
    except (OrderUnknown, ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    testimonies: list[Testimony] = []
    version = args.version
    engine = args.engine or ("" if args.path or args.wheel or args.captured else "sglang")
    if args.path or args.wheel or engine:
        if args.path or args.wheel:
            files = tree.folder(args.path) if args.path else tree.wheel(args.wheel)
        elif engine == "sglang" and not sglang.is_installed("sglang"):
            print(sglang.sglang_finding())
            return 0
        else:
            files = tree.installed(engine)
        version = version or files.version
        found = source.find_sites(files, engine)
        testimonies.append(source.testify(files, engine, found))
        if engine == "sglang" and not (args.path or args.wheel):
            testimonies.append(_ask_sglang())
    if args.captured:
        testimonies.append(numeric.compare(**numeric.load(args.captured)).testimony())
    verdict = judge(engine or args.path or args.wheel or args.captured, version, testimonies)
    print(verdict)
    if any(t.witness == "source" and t.order for t in testimonies):
        print("\nL is kv_lora_rank (512), R is qk_rope_head_dim (64).")
    if args.record:
        # No path of this machine: the wheel's name, or what kind of thing was read.
        read_from = Path(args.wheel).name if args.wheel else (
            "source tree" if args.path else "installed package")
        engines.record(engines.from_sites(engine, version, read_from, found))
        if engine == "sglang" and not (args.path or args.wheel):
            sglang.record(sglang.sglang_pool_order())
    return 0 if verdict.order else 1


def _ask_sglang() -> Testimony:
    try:
        return sglang.ask_installed()
    except OrderUnknown:
        raise  # an answer, and one to look into
    except Exception as error:  # another version's pool, or an installation that lacks parts
        return Testimony("live buffer", None, (f"{type(error).__name__}: {error}",))


if __name__ == "__main__":
    sys.exit(main())
