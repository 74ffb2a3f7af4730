"""One question, one answer, one grade."""

from __future__ import annotations

from typing import Any

from molt_core.agents.base import Context, Grader, Result


class SingleTurnAgent:
    """Samples one answer to the prompt and grades its text."""

    def __init__(self, grader: Grader) -> None:
        self.grader = grader

    async def run(self, context: Context) -> Result:
        prompt = context.prompt
        generation = await context.generate(prompt.token_ids, prompt.images)
        return Result(
            reward=float(self.grader(prompt.answer, generation.text)),
            info={"text": generation.text},
        )


def exact_match(answer: Any, text: str) -> float:
    """1.0 where the text equals the answer, blanks at both ends aside."""
    return float(text.strip() == str(answer).strip())
