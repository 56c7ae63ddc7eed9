"""Flags that benchmarks share: a layer's sizes, and what FSDP is told."""

from __future__ import annotations

import argparse

from hf_laer.bench.layer import LAYERS, LayerShape
from hf_laer.bench.routing import KNOWN


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """A layer by name, or its sizes, and tokens per rank."""
    parser.add_argument("--layer", choices=LAYERS, help="a layer by name; sizes given by hand go before it")
    for name in ("experts", "hidden", "intermediate", "top-k"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per rank (default 8192)")
    parser.add_argument("--routing", default="balanced,95:4", help=f"{KNOWN}; comma separated")
    parser.add_argument("--iterations", type=int, default=8, help="timed iterations (default 8)")


def add_reshard_argument(parser: argparse.ArgumentParser) -> None:
    """FSDP's ``reshard_after_forward``, which experts follow."""
    how = argparse.BooleanOptionalAction
    parser.add_argument("--reshard-after-forward", action=how, default=True, help="FSDP's, for all contenders")


def shape_of(args: argparse.Namespace) -> LayerShape:
    """The layer that the flags name.

    Raises:
        ValueError: A size is missing or impossible.
    """
    sizes = dict(LAYERS.get(args.layer or "", {}))
    for name in ("experts", "hidden", "intermediate", "top_k"):
        given = getattr(args, name)
        if given is not None:
            sizes[name] = given
        if sizes.get(name, 0) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, or name a layer: {', '.join(LAYERS)}")
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens} must be at least 1")
    if args.iterations < 1:
        raise ValueError(f"--iterations {args.iterations} must be at least 1")
    return LayerShape(**sizes, tokens=args.tokens)
