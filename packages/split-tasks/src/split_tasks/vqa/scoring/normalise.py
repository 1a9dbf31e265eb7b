"""Answers in the standard form of the VQA benchmark: lower case, no articles, no punctuation, digits for numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
ARTICLES = frozenset({"a", "an", "the"})
NUMBERS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip
COMMA_IN_NUMBER = re.compile(r"(?<=\d),(?=\d)")
PERIOD = re.compile(r"\.(?!\d)")
SHORTENED = """
ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's isn't it'd
it'll let's ma'am mightn't might've mustn't needn't not've o'clock oughtn't shan't she'd should've shouldn't somebody'd
somebody'll somebody's someone'd someone'll someone's something'd something'll that'd that's there'd there're there's
they'd they'll they're they've 'twas wasn't we've weren't what'll what're what's what've when's where'd where's where've
who'd who'll who's who've why'll why're why's won't would've wouldn't y'all you'd you'll you're you've
couldn't've hadn't've shouldn't've wouldn't've
"""
CONTRACTIONS = {word.replace("'", ""): word for word in SHORTENED.split()}
"""Written without apostrophe -> with. Words that are words without one too (were, ill, wed, hell, well, its) are left
alone."""


def normalise(answer: str) -> str:
    """The benchmark's standard form.

    A sign goes where it touches a space anywhere in the answer, or where a comma stands between digits, and becomes a
    space otherwise ("red/blue" is two words, "red / blue" too). A period goes unless a digit follows it.
    """
    given = answer.replace("\n", " ").replace("\t", " ").strip()
    text, glued = given, COMMA_IN_NUMBER.search(given) is not None
    for sign in PUNCTUATION:
        free = f"{sign} " in given or f" {sign}" in given or glued
        text = text.replace(sign, "" if free else " ")
    text = PERIOD.sub("", text)
    words = [NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def normalise_textvqa(answer: str) -> str:
    """TextVQA's form: commas and question marks go first, and the s of a genitive stands alone."""
    words = answer.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    return normalise(words)


def soft_accuracy(said: str, answers: Sequence[str]) -> float:
    """The mean over all ways to leave one annotator out of min(1, how many of the others agree / 3)."""
    matches = [answer == said for answer in answers]
    total = sum(matches)
    return sum(min(1.0, (total - own) / 3) for own in matches) / len(matches)
