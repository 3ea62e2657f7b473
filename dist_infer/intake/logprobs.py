"""Scores of tokens in the forms in which records tell them. Strict JSON: every number is finite.

A token is told as text and, in chats, as bytes: a token may be a part of a character, which text shows as U+FFFD.

Source: the OpenAI chat-completion and completion objects; prompt_logprobs as vLLM's PromptLogprobs.
"""

from collections.abc import Sequence

from dist_infer.intake.records import JsonObject
from dist_infer.intake.text import TextCodec
from dist_infer.types import TokenScore


def chat_logprobs(scores: Sequence[TokenScore], text: TextCodec | None) -> JsonObject:
    """`choices[].logprobs` of a chat."""
    return {
        "content": [
            _chat_token(score.token_id, score.logprob, text)
            | {"top_logprobs": [_chat_token(token_id, logprob, text) for token_id, logprob in score.top]}
            for score in scores
        ]
    }


def completion_logprobs(scores: Sequence[TokenScore], text: TextCodec | None) -> JsonObject:
    """`choices[].logprobs` of a completion. The sampled token is always among the likeliest ones that are told.

    Two tokens that read alike are one key there, with the likelier one's value.
    """
    tokens = [_text(score.token_id, text) for score in scores]
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [_top_by_text(score, text) for score in scores],
        "text_offset": offsets[:-1],
    }


def prompt_logprobs(scores: Sequence[TokenScore], text: TextCodec | None) -> list[JsonObject | None]:
    """An entry for each token of the prompt; the first one has no score."""
    return [None, *(_prompt_entry(score, text) for score in scores)]


def _chat_token(token_id: int, logprob: float, text: TextCodec | None) -> JsonObject:
    own = None if text is None else list(text.token_bytes(token_id))
    return {"token": _text(token_id, text), "logprob": logprob, "bytes": own}


def _top_by_text(score: TokenScore, text: TextCodec | None) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
        top.setdefault(_text(token_id, text), logprob)
    return top


def _prompt_entry(score: TokenScore, text: TextCodec | None) -> JsonObject:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(score.top, start=1)]
    if all(token_id != score.token_id for token_id, _, _ in ranked):
        ranked.append((score.token_id, score.logprob, score.rank))
    return {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": _text(token_id, text)}
        for token_id, logprob, rank in ranked
    }


def _text(token_id: int, text: TextCodec | None) -> str:
    return f"token_id:{token_id}" if text is None else text.token_bytes(token_id).decode(errors="replace")
