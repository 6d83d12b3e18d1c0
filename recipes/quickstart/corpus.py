# SPDX-License-Identifier: Apache-2.0
"""Prompts and reference answers of the quickstart target, from a seeded grammar.

An answer is three of four sentences of its kind. Which sentence comes next is decided by a class of a
word in the prompt (what terrain the place has, what the object is made of, ...), and
the sentence then copies or looks up words. So greedy decoding has to read the prompt,
no sentence repeats inside an answer, and the text in between is predictable.
"""

import random
import zlib

from phrases import (
    ANIMALS,
    COLOURS,
    CROPS,
    DAYS,
    DISHES,
    FOODS,
    KEEPERS,
    KINDS,
    MOODS,
    NAMES,
    NUMBERS,
    OBJECTS,
    PLACES,
    TIMES,
    VEHICLES,
    WEATHERS,
)

CLASSED = {
    "animal": ANIMALS,
    "object": OBJECTS,
    "place": PLACES,
    "target": PLACES,
    "dish": DISHES,
    "vehicle": VEHICLES,
}
FLAT = {
    "name": NAMES,
    "friend": NAMES,
    "mood": MOODS,
    "weather": WEATHERS,
    "time": TIMES,
    "colour": COLOURS,
    "day": DAYS,
    "crop": CROPS,
    "extra": CROPS,
    "number": NUMBERS,
}
WORDS = {**{slot: " ".join(rows).split() for slot, rows in CLASSED.items()}, **FLAT}


def class_of(slot, value):
    """Row of the word in its table: this number chooses the sentence."""
    for row, words in enumerate(CLASSED.get(slot, ())):
        if value in words.split():
            return row
    return WORDS[slot].index(value)


def draw(rng):
    """One random prompt as (kind, prompt index, slots)."""
    kind = rng.choice(sorted(KINDS))
    slots = {slot: rng.choice(words) for slot, words in sorted(WORDS.items())}
    return kind, rng.randrange(2), slots


def is_sound(slots):
    """Pairs drawn from the same list must differ, or copying would be ambiguous."""
    pairs = (("name", "friend"), ("place", "target"), ("crop", "extra"))
    return all(slots[a] != slots[b] for a, b in pairs)


def is_held_out(kind, slots):
    """True for one in thirty pairs (name, subject): those pairs are never trained on."""
    key = f"{slots['name']}|{slots[KINDS[kind][0]]}"
    return zlib.crc32(key.encode()) % 30 == 0


def render(kind, variant, slots):
    """Prompt and reference answer of one draw."""
    _, prompts, parts = KINDS[kind]
    animal = WORDS["animal"].index(slots["animal"])
    thing = WORDS["object"].index(slots["object"])
    # Looked-up facts cut across the rows, so the class alone does not tell them.
    facts = {"food": FOODS[animal % len(FOODS)], "keeper": KEEPERS[thing % len(KEEPERS)]}
    chooser = {"food": animal % len(FOODS), "keeper": thing % len(KEEPERS)}
    sentences = []
    # The first wording leaves out the third sentence, the second wording the second.
    for slot, variants in (parts[0], parts[1 + variant], parts[3]):
        row = chooser[slot] if slot in chooser else class_of(slot, slots[slot])
        sentences.append(variants[row % len(variants)].format(**slots, **facts))
    return prompts[variant].format(**slots), " ".join(sentences)


def pairs(seed, held_out=False):
    """Endless (prompt, answer) stream, only from one side of the held-out rule."""
    rng = random.Random(seed)
    while True:
        kind, variant, slots = draw(rng)
        if is_sound(slots) and is_held_out(kind, slots) == held_out:
            yield render(kind, variant, slots)


if __name__ == "__main__":
    stream = pairs(0)
    for _ in range(12):
        print("\n".join(next(stream)), end="\n\n")
