"""Prompts and verifiers of the library reasoning-gym, any of its generators by name."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from examples.rlhf.tasks import PromptSplit, Row, divided


def split(domains: Sequence[str], num_train: int, num_held_out: int, seed: int = 0) -> PromptSplit:
    """As `examples.rlhf.tasks.split`, with the names of generators as domains."""
    return divided([_distinct(domain, num_held_out + num_train, seed) for domain in domains], num_held_out)


def verified(row: Row, response: str) -> float:
    """The generator's own score of a response, 0..1; what stands in answer tags counts, or else all of it."""
    library = _library()
    tagged = library.utils.extract_answer(response)
    score = library.get_score_answer_fn(row["domain"])
    return float(score(answer=response.strip() if tagged is None else tagged, entry=row["entry"]))


def _distinct(domain: str, num_rows: int, seed: int) -> list[Row]:
    library = _library()
    if domain not in library.factory.DATASETS:
        known = ", ".join(library.factory.DATASETS)
        raise ValueError(f"reasoning-gym has no generator {domain!r}. Use some of {known}.")
    rows: dict[str, Row] = {}
    # More than are needed, because generators repeat themselves, those of simple questions often.
    for i, entry in enumerate(library.create_dataset(domain, size=20 * num_rows, seed=seed)):
        if len(rows) == num_rows:
            break
        answer = str(entry["answer"])
        row = Row(
            prompt=entry["question"],
            answer=answer,
            demonstration=answer,
            domain=domain,
            prompt_id=f"{domain}:{seed}-{i}",
            entry=entry,
        )
        rows.setdefault(row["prompt"], row)
    if len(rows) < num_rows:
        raise ValueError(f"Generator {domain!r} gave {len(rows)} prompts and {num_rows} are asked for. Ask for fewer.")
    return list(rows.values())


def _library() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "source 'reasoning_gym' needs the package reasoning-gym. Run `pip install lightning_dataflex[gym]`."
        ) from error
    return reasoning_gym
