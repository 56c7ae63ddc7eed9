"""Chat pairs in three domains, made from what every CPython carries: nothing is downloaded.

The domains use their experts differently, which is what a demonstration of load balance needs: prose (the
language reference in ``pydoc_data``), code (functions of the standard library with their docstrings) and
arithmetic (generated). Every pair is a row in TRL's conversational prompt-completion format, with its domain
beside it.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

DOMAINS = ("reference", "code", "arithmetic")

# Plain Python modules that have been in every CPython for long. Which of their functions change between minor
# versions does not matter: what a version lacks is left out, and the order of the rest stays.
MODULES = """
    abc argparse ast base64 bdb bisect calendar cmd code codeop collections colorsys configparser
    contextlib copy csv dataclasses difflib dis email.utils enum filecmp fileinput fnmatch fractions
    ftplib functools genericpath getopt getpass gettext glob gzip hashlib heapq hmac html
    http.client http.cookiejar imaplib inspect ipaddress json.decoder json.encoder linecache locale
    logging mailbox mimetypes ntpath numbers operator optparse os pdb pickle pickletools pkgutil
    platform plistlib poplib posixpath pprint profile pstats pyclbr pydoc queue quopri random
    reprlib runpy sched selectors shelve shlex shutil smtplib socket socketserver statistics string
    stringprep subprocess symtable tabnanny tarfile tempfile textwrap threading timeit tokenize
    trace traceback turtle types typing unittest.case unittest.mock urllib.parse urllib.request uuid
    wave weakref webbrowser xml.dom.minidom zipapp
"""


FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def open_dataset(
    name: str | None,
    config: str | None = None,
    *,
    streaming: bool = False,
    per_domain: int = 512,
    block: int = 0,
    seed: int = 0,
) -> DatasetDict | IterableDatasetDict:
    """The data set to train on, its splits by name.

    Args:
        name: A hub id, a folder made by ``save_to_disk``, or a local JSON, JSON Lines, CSV or Parquet file,
            in any format that TRL's ``SFTTrainer`` takes. ``None`` makes chat pairs from this Python (splits
            ``train`` and ``test``, a sixteenth).
        config: The hub data set's configuration.
        streaming: Stream a hub data set.
        per_domain: Rows of each domain where ``name`` is ``None``; ``block`` and ``seed`` as in
            :func:`chat_rows`.
        block: See there.
        seed: See there.
    """
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    if name is None:
        rows = chat_rows(per_domain, block=block, seed=seed)
        # Every sixteenth row, so that both splits hold all domains in the same order.
        test = [row for index, row in enumerate(rows) if index % 16 == 15]
        train = [row for index, row in enumerate(rows) if index % 16 != 15]
        return DatasetDict({"train": Dataset.from_list(train), "test": Dataset.from_list(test)})
    path = Path(name)
    if path.is_file():
        if path.suffix not in FILE_BUILDERS:
            raise ValueError(f"dataset_name={name}: a local file must end in {', '.join(FILE_BUILDERS)}")
        return load_dataset(FILE_BUILDERS[path.suffix], data_files=str(path), streaming=streaming)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        found = load_from_disk(name)
        return found if isinstance(found, DatasetDict) else DatasetDict({"train": found})
    return load_dataset(name, name=config, streaming=streaming)


def chat_rows(per_domain: int = 512, *, block: int = 0, seed: int = 0, max_chars: int = 900) -> list[dict[str, Any]]:
    """Rows of all domains; the same for the same arguments and Python version.

    Args:
        per_domain: Rows wanted of each domain; a domain that has fewer gives all it has (arithmetic never
            runs out).
        block: So many rows of one domain follow one another, then of the next, as in a data set put together
            from several; 0 mixes all.
        seed: Chooses and mixes the rows.
        max_chars: Upper bound of prompt and completion together, so that a row fits a short sequence.

    Returns:
        Rows with ``prompt`` and ``completion`` (lists of one chat message) and ``domain``.
    """
    if per_domain < 6 or block < 0:
        raise ValueError(f"per_domain={per_domain} must be at least 6, block={block} not negative")
    domains = [domain_rows(domain, per_domain, seed=seed, max_chars=max_chars) for domain in DOMAINS]
    if block:
        starts = range(0, per_domain, block)
        return [row for start in starts for rows in domains for row in rows[start : start + block]]
    mixed = [row for rows in domains for row in rows]
    random.Random(seed).shuffle(mixed)
    return mixed


def domain_rows(domain: str, count: int, *, seed: int = 0, max_chars: int = 900) -> list[dict[str, Any]]:
    """Up to ``count`` rows of one domain; arguments as in :func:`chat_rows`."""
    rng = random.Random(f"{domain}-{seed}")
    if domain == "arithmetic":
        pairs = [_arithmetic(rng) for _ in range(count)]
    elif domain in ("reference", "code"):
        source = _reference() if domain == "reference" else _functions()
        found = [pair for pair in source if len(pair[0]) + len(pair[1]) <= max_chars]
        rng.shuffle(found)
        pairs = found[:count]
    else:
        raise ValueError(f"domain={domain!r} is not one of {', '.join(DOMAINS)}")
    return [_row(prompt, completion, domain) for prompt, completion in pairs]


def _row(prompt: str, completion: str, domain: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": completion}],
        "domain": domain,
    }


def _reference() -> Iterator[tuple[str, str]]:
    """Paragraphs of Python's language reference, each asked for by its topic and first words."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "This Python comes without pydoc_data (the language reference): install the distribution's full "
            "standard library, or pass --dataset_name"
        ) from error
    for topic in sorted(topics):
        paragraphs = re.split(r"\n\s*\n", topics[topic])
        title = paragraphs[0].splitlines()[0].strip()
        for paragraph in paragraphs[1:]:
            text = " ".join(paragraph.split())
            if len(text) >= 120:
                start = " ".join(text.split()[:6])
                yield f"In Python's reference, under {title}, continue: {start}", text


@cache
def _functions() -> tuple[tuple[str, str], ...]:
    """Functions of the standard library: the docstring asks, the body answers. Reading them takes seconds."""
    return tuple(pair for module in MODULES.split() for pair in _functions_of(module))


def _functions_of(module: str) -> Iterator[tuple[str, str]]:
    for node in _definitions(module):
        docstring = ast.get_docstring(node)
        if not docstring or len(node.body) < 2:
            continue
        # A copy without the docstring, written out anew: no comments, one formatting in every Python version.
        node.body = node.body[1:]
        node.decorator_list = []
        yield f"Write the Python function {node.name}: {docstring}", ast.unparse(node)


def _definitions(module: str) -> list[ast.FunctionDef]:
    """Functions and methods in the source of ``module``, in source order; none where this Python lacks it."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return []
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return []
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return sorted(found, key=lambda node: node.lineno)


def _arithmetic(rng: random.Random) -> tuple[str, str]:
    """One question of school arithmetic with its working."""
    return rng.choice((_sum, _product, _change, _sequence))(rng)


def _sum(rng: random.Random) -> tuple[str, str]:
    numbers = [rng.randint(11, 9999) for _ in range(rng.randint(3, 6))]
    lines, total = [], numbers[0]
    for number in numbers[1:]:
        lines.append(f"{total} + {number} = {total + number}")
        total += number
    return f"Add {', '.join(map(str, numbers))}.", "\n".join([*lines, f"The sum is {total}."])


def _product(rng: random.Random) -> tuple[str, str]:
    left, right = rng.randint(12, 999), rng.randint(12, 99)
    tens, ones = right // 10 * 10, right % 10
    working = f"{left} * {tens} = {left * tens}\n{left} * {ones} = {left * ones}"
    return f"What is {left} * {right}?", (
        f"{working}\n{left * tens} + {left * ones} = {left * right}\nThe product is {left * right}."
    )


def _change(rng: random.Random) -> tuple[str, str]:
    count, price = rng.randint(2, 12), rng.randint(2, 75)
    paid = count * price + rng.randint(1, 60)
    return f"{count} tickets cost {price} each. I pay with {paid}. What is my change?", (
        f"{count} * {price} = {count * price}\n{paid} - {count * price} = {paid - count * price}\n"
        f"The change is {paid - count * price}."
    )


def _sequence(rng: random.Random) -> tuple[str, str]:
    start, step, length = rng.randint(0, 99), rng.randint(2, 49), rng.randint(5, 12)
    shown = [start + step * index for index in range(length)]
    after = [shown[-1] + step * index for index in range(1, 6)]
    return f"Continue: {', '.join(map(str, shown))}", (
        f"Each number is {step} more than the one before: {', '.join(map(str, after))}"
    )
