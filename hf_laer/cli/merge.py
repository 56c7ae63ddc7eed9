"""``hf-laer merge``: an ordinary Transformers checkpoint from a sharded one."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from hf_laer.config import DTYPES

HELP = "write an ordinary Transformers checkpoint from one saved with SHARDED_STATE_DICT; needs neither ranks nor GPUs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hf-laer merge``."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="a checkpoint, or its pytorch_model_fsdp_0")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that is empty or does not exist")
    parser.add_argument("--model", help="folder or Hub name with config and tokenizer, where DIR has none")
    parser.add_argument("--max-shard-size", default="5GB", help="of one file; bounds memory (default 5GB)")
    parser.add_argument("--dtype", choices=DTYPES, help="cast weights (default: as saved)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Merges, and lists what was written."""
    import torch

    from hf_laer.integrations.transformers.merge import merge

    dtype = getattr(torch, args.dtype) if args.dtype else None
    for path in merge(args.directory, args.out, model=args.model, max_shard_size=args.max_shard_size, dtype=dtype):
        console.print(f"{path}  {path.stat().st_size:,} bytes", highlight=False)
    return 0
