"""Asks a saved model a question with nothing but Transformers: a checkpoint that hf_laer trained does not
need it.

    python recipes/generate.py outputs/sft/final "What is 17 * 24?"
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer


def answer(model_path: str, question: str, *, max_new_tokens: int = 48) -> str:
    """The model's greedy answer to one chat message."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True).to(
        model.device
    )
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Reads the command line and prints the answer."""
    parser = argparse.ArgumentParser(description="Ask a saved model, with nothing but Transformers.")
    parser.add_argument("model", help="folder or hub id of a checkpoint")
    parser.add_argument("question", nargs="?", default="What is 24 * 17?")
    parser.add_argument("--max_new_tokens", type=int, default=48)
    options = parser.parse_args()
    console = Console()
    text = answer(options.model, options.question, max_new_tokens=options.max_new_tokens)
    console.print(f"{options.question}\n{text}", markup=False, highlight=False)
    console.print(f"hf_laer imported: {'hf_laer' in sys.modules}", highlight=False)


if __name__ == "__main__":
    main()
