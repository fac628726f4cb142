"""Generates random names, ids, amounts and dates for the quickstart's documents.

A checksum divides the possible values into two splits: one for the training text, the other for
`prompts.parquet`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal
from zlib import crc32

Split = Literal["train", "prompts"]


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


def phrases(text: str) -> list[str]:
    """Return the parts of a text between commas."""
    return text.split(", ")


FIRST_A = words("Mar Al Jo El Ka Li Ro Ta Be Da Fe Ha Is Lu Ni Or Pe Sa Te Vi Bo Cor Em Mi")
FIRST_B = words("ra li no sa mi te lo vi da ne ri ba")
FIRST_C = words("n s na ra né lle ck th m nor wen bert dan la")
LAST_A = words("Dos Hal Bran Kes Lin Mor Nor Pel Rav Sten Tor Val Wex Zim Ost Gar Fal Bel Hol Cra")
LAST_B = words("ti ber ka lo den va ri mo se gu")
LAST_C = words("k son ström man ski ley dt rt ner ton berg well ris mond")
TOWN_A = words("Ash Birk Cold Dun Elm Fair Green Hart Kings Long Mill North Oak Rock Silver Stan")
TOWN_B = words("ing er en le")
TOWN_C = words("ford ham bridge field port wick mouth bury dale haven stead gate")
STREET_KINDS = words("Street Road Lane Way Avenue Square")
COMPANY_KINDS = words("Ltd GmbH Inc Group Partners Trading")
MATERIALS = words("Walnut Steel Bamboo Leather Glass Copper Cotton Ceramic Linen Marble")
COLOURS = words("Black White Green Blue Red Grey Yellow Brown")
GOODS = phrases(
    "Desk Lamp, Office Chair, Kettle, Backpack, Keyboard, Headset, Notebook, Bookshelf, Coffee "
    "Mug, Wall Clock, Travel Bag, Monitor Stand, Water Bottle, Side Table, Pencil Case, Toaster"
)
SERVICES = words("billing search login mailer gateway catalog basket payment storage report")
CURRENCIES = words("EUR USD GBP CHF")


class Values:
    """Generates values that belong to one split.

    A value belongs to the prompts if its checksum is a multiple of eight, else to the training
    text. This applies to each word of a name.
    """

    def __init__(self, seed: int, split: Split) -> None:
        self.rng = random.Random(f"{split}-{seed}")
        self._held_out = split == "prompts"

    def pick(self, choices: tuple[str, ...] | list[str]) -> str:
        """Return a random choice among words that both splits use."""
        return self.rng.choice(choices)

    def owns(self, value: str) -> bool:
        """Return whether the value belongs to this split."""
        return (crc32(value.encode()) % 8 == 0) == self._held_out

    def draw(self, make: Callable[[], str]) -> str:
        """Call `make` until it returns a value of this split."""
        while not self.owns(value := make()):
            pass
        return value

    def join(self, *parts: list[str]) -> str:
        """Return a word composed of one piece from each list."""
        return self.draw(lambda: "".join(self.pick(part) for part in parts))

    def digits(self, count: int) -> str:
        """Return a number with `count` digits, whose first digit is not zero."""
        low = 10 ** (count - 1)
        return str(self.rng.randrange(low, 10 * low))

    def person(self) -> str:
        return f"{self.first_name()} {self.join(LAST_A, LAST_B, LAST_C)}"

    def first_name(self) -> str:
        return self.join(FIRST_A, FIRST_B, FIRST_C)

    def town(self) -> str:
        return self.join(TOWN_A, TOWN_B, TOWN_C)

    def street(self) -> str:
        number = self.rng.randrange(1, 100)
        return f"{number} {self.join(LAST_A, TOWN_B, TOWN_C)} {self.pick(STREET_KINDS)}"

    def company(self) -> str:
        return f"{self.join(LAST_A, LAST_B, LAST_C)} {self.pick(COMPANY_KINDS)}"

    def email(self, name: str) -> str:
        """Return an ASCII mail address for the first name of `name`."""
        user = name.split()[0].lower().replace("é", "e")
        return f"{user}@{self.town().lower()}.{self.pick(['com', 'net', 'org'])}"

    def order(self) -> str:
        return self.draw(lambda: f"SO-{self.digits(5)}")

    def invoice(self) -> str:
        return self.draw(lambda: f"INV-{self.digits(5)}")

    def number(self, count: int) -> str:
        return self.draw(lambda: self.digits(count))

    def phone(self) -> str:
        return self.draw(lambda: f"{self.digits(3)}-{self.digits(4)}")

    def date(self) -> str:
        def make() -> str:
            year, month = self.rng.randrange(2021, 2030), self.rng.randrange(1, 13)
            return f"{year}-{month:02d}-{self.rng.randrange(1, 29):02d}"

        return self.draw(make)

    def time(self) -> str:
        def make() -> str:
            return f"{self.rng.randrange(7, 20):02d}:{self.rng.randrange(0, 60, 5):02d}"

        return self.draw(make)

    def clock(self) -> str:
        def make() -> str:
            hour, minute, second = (self.rng.randrange(n) for n in (24, 60, 60))
            return f"{hour:02d}:{minute:02d}:{second:02d}"

        return self.draw(make)

    def room(self) -> str:
        return self.draw(lambda: f"{self.pick(list('ABCDEFGHK'))}-{self.digits(3)}")

    def product(self) -> str:
        def make() -> str:
            return f"{self.pick(COLOURS)} {self.pick(MATERIALS)} {self.pick(GOODS)}"

        return self.draw(make)
