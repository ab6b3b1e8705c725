"""Random prompts of a wanted length. It knows only a tokenizer's encode and decode, and works without one too."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass

from pageframe.benchmarks.client.errors import InputError
from pageframe.benchmarks.client.prompt_file import Prompt
from pageframe.benchmarks.client.server import RemoteTokenizer

MAX_TRIES = 6
BATCH = 16

# common enough that most vocabularies hold each of them, with a space before it, as one token
COMMON_WORDS = """
able about above act add after again age ago air all also always and animal another answer any appear area ask
back bad base be bear beat beauty become bed began begin behind believe best better between big bird black blood
blue boat body book both box boy bring brother build business busy but buy call came can car care carry case catch
cause center certain chance change check child city class clear close cold color come common complete contain
continue control cool correct cost could country course cover cross cry cut dark day deep did differ direct
discuss distance do door down draw drive dry during each early earth ease east eat effect eight end energy enough
even evening ever every exact example eye face fact fall family famous far farm fast father fear feel feet few
field figure final find fine finish fire first fish five floor follow food foot for force foreign form forward
found four free friend from front full game garden general gentle get girl give glass go gold gone good govern
grand great green ground group grow guess had half hand happen happy hard have head hear heart heat heavy help
here high history hold home hope horse hot hour house human hundred ice idea inch industry interest island job
join jump just keep kept key kind king knew know land language large last late laugh law lead learn leave left
less letter level life light like line list listen little live local long look lost love low machine made main
major make man many map mark market matter may mean measure meet method middle might mile milk million mind minute
miss money month moon more morning most mother motion mountain mouth move much music must name nature near need
never new next night nine noise north note nothing notice number object ocean off office often oil old once one
only open order other our out over own page paint pair paper part pass past path pattern pay people perhaps person
phone picture piece place plain plan plant play please point poor position possible power present press pretty
problem produce product public pull push question quick quiet race rain raise range rate reach read ready real
reason record red region rest result rich ride right rise river road rock room rule run safe sail said same sand
save say school science sea season second see seem self sell send sense sentence serve set seven several shape
share ship short show side sign silver similar simple since sing sister sit six size skin sky sleep slow small snow
soft soil soldier some son song soon sound south space speak special speed spring square stand star start state
station stay step still stone stop store story street strong student study such sudden summer sun sure surface
surprise system table tail take talk teach team tell ten test than that their them then there these thing think
third this though thought thousand three through time together told took top total touch toward town trade train
travel tree trip trouble true try turn two type under unit until use usual valley value very view village visit
voice wait walk wall want war warm wash watch water wave way weather week weight well went west what wheel when
where which while white who whole why wide wife will wind window winter wish woman wonder wood word work world
write year yellow yes yet young
"""
WORDS = COMMON_WORDS.split()


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts and, in words, how their lengths came about."""

    prompts: list[Prompt]
    note: str


def word_prompts(count: int, length: int, seed: int) -> PromptSet:
    """Prompts of `length` words, for a server that offers no tokenizer."""
    prompts = [Prompt(text=_words(_draw(seed, index), length)) for index in range(count)]
    return PromptSet(
        prompts, f"random, {length} words each; the server offers no /tokenize, so tokens are only near that"
    )


async def token_prompts(tokenizer: RemoteTokenizer, count: int, length: int, seed: int, *, chat: bool) -> PromptSet:
    """Prompts of `length` tokens by the server's own tokenizer.

    For completions the length includes the special tokens that the server adds (BOS); for chat it is that of the
    message's content, before the template. A prompt's `num_tokens` is the measured length (None for chat, where
    the template's share is not known).
    """
    num_special = 0
    if not chat:
        plain = await _encode(tokenizer, "hello")
        num_special = len(await _encode(tokenizer, "hello", add_special_tokens=True)) - len(plain)
    content_length = max(1, length - num_special)
    measured: list[tuple[str, int]] = []
    for start in range(0, count, BATCH):
        indices = range(start, min(start + BATCH, count))
        texts = [_text_of_length(tokenizer, content_length, _draw(seed, index)) for index in indices]
        measured += await asyncio.gather(*texts)
    lengths = [content + num_special for _, content in measured]
    prompts = [
        Prompt(text=text, num_tokens=None if chat else total)
        for (text, _), total in zip(measured, lengths, strict=True)
    ]
    of_what = "in the message, before the template" if chat else "special tokens included"
    if set(lengths) == {length}:
        return PromptSet(prompts, f"random, exactly {length} tokens each by the server's /tokenize ({of_what})")
    return PromptSet(
        prompts, f"random, {min(lengths)} to {max(lengths)} tokens each by the server's /tokenize ({of_what})"
    )


async def _text_of_length(tokenizer: RemoteTokenizer, length: int, draw: random.Random) -> tuple[str, int]:
    """A text of `length` tokens, or after MAX_TRIES the nearest seen; and its measured length.

    Words that are one token each give the length at once. Otherwise the tokens are cut and decoded; the cut text
    need not encode to the same tokens again, so it is measured too.
    """
    nearest: tuple[str, int] | None = None
    num_words = length
    for _ in range(MAX_TRIES):
        text = _words(draw, num_words)
        ids = await _encode(tokenizer, text)
        seen = [(text, len(ids))]
        if len(ids) > length:
            cut = await tokenizer.decode(ids[:length])
            if cut:
                seen.append((cut, len(await _encode(tokenizer, cut))))
        elif len(ids) < length:
            num_words += math.ceil((length - len(ids)) * num_words / len(ids))
        nearest = min([*seen, *([nearest] if nearest else [])], key=lambda pair: abs(pair[1] - length))
        if nearest[1] == length:
            break
    assert nearest is not None
    return nearest


async def _encode(tokenizer: RemoteTokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    ids = await tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not ids:
        raise InputError(f"{tokenizer.server.base_url}/tokenize does not tokenize a prompt of {len(text)} characters")
    return ids


def _draw(seed: int, index: int) -> random.Random:
    return random.Random(f"prompt {seed} {index}")


def _words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))
