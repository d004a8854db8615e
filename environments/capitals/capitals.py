"""Capitals of well-known countries: a large model knows them, a very small one knows some."""

from __future__ import annotations

import random
import re

import verifiers as vf

CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Bangladesh": "Dhaka",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Colombia": "Bogota",
    "Croatia": "Zagreb",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Jamaica": "Kingston",
    "Japan": "Tokyo",
    "Jordan": "Amman",
    "Kenya": "Nairobi",
    "Lebanon": "Beirut",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "New Zealand": "Wellington",
    "Nigeria": "Abuja",
    "Norway": "Oslo",
    "Pakistan": "Islamabad",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Saudi Arabia": "Riyadh",
    "Senegal": "Dakar",
    "Serbia": "Belgrade",
    "Spain": "Madrid",
    "South Korea": "Seoul",
    "Sweden": "Stockholm",
    "Syria": "Damascus",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Ukraine": "Kyiv",
    "Vietnam": "Hanoi",
    "the Netherlands": "Amsterdam",
    "the Philippines": "Manila",
}
OTHER_SPELLINGS = {"delhi": "new delhi", "kiev": "kyiv", "brasília": "brasilia", "bogotá": "bogota"}
NAMES = sorted((*(city.lower() for city in CAPITALS.values()), *OTHER_SPELLINGS), key=len, reverse=True)
_NAMED = re.compile(rf"\b(?:{'|'.join(map(re.escape, NAMES))})\b")


def cities_in(text: str) -> set[str]:
    """The capitals that a text mentions, in a canonical spelling."""
    return {OTHER_SPELLINGS.get(name, name) for name in _NAMED.findall(text.lower())}


def first_sentence(text: str) -> str:
    return re.split(r"[.!?\n]", text.strip(), maxsplit=1)[0]


def load_environment(seed: int = 0) -> vf.SingleTurnEnv:
    """The capitals of about sixty countries: half for training, half for evaluation."""
    countries = list(CAPITALS)
    random.Random(seed).shuffle(countries)
    rows = [{"question": f"What is the capital of {name}?", "answer": CAPITALS[name]} for name in countries]
    parser = vf.Parser(extract_fn=first_sentence)

    def correct(completion: vf.Messages, answer: str) -> float:
        """The first sentence names the right capital, and no other."""
        return float(cities_in(parser.parse_answer(completion) or "") == {answer.lower()})

    half = len(rows) // 2
    return vf.SingleTurnEnv(
        dataset=rows[:half], eval_dataset=rows[half:], parser=parser, rubric=vf.Rubric([correct], parser=parser)
    )
