"""Make the quickstart's rows: office text, a question about it, and the one right answer.

Everything is put together from the templates in this file, so the training text needs no
download and the expected answer of a row is known exactly. Names, ids, amounts, dates and the
like are drawn from large spaces that are cut in two by checksum: the training text uses one side,
`prompts.parquet` the other. A model can therefore answer a prompt only by copying from it.

    python jobs/quickstart/make_data.py        # writes jobs/quickstart/prompts.parquet
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Literal
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq

Split = Literal["train", "prompts"]
HERE = Path(__file__).resolve().parent
PROMPTS_PATH = HERE / "prompts.parquet"
PROMPTS_SEED = 20_260
NUM_PROMPTS = 2_048

# One long instruction per task. Rows share them, so they are the shared prefix of the job.
# The first sentence alone says which task it is.
INSTRUCTIONS: dict[str, str] = {
    "ticket": (
        "Read the support ticket and find the order number and the customer. "
        "The ticket has a header with the sender and a subject, and then the text of the message. "
        "The order number begins with SO and is written somewhere in the text. "
        "Do not take the ticket number, the phone number or the customer number for it. "
        "The customer is the full name of the sender, as in the header. "
        "Copy both values letter by letter. "
        'Answer with one JSON object with the keys "order" and "customer", in that order, '
        "and write nothing before or after it."
    ),
    "triage": (
        "Read the support ticket and sort it by category and urgency. "
        "The category is one of billing, delivery, returns, technical and account. "
        "Billing is about money that was charged, delivery about parcels on their way, returns "
        "about goods that go back, technical about things that do not work, and account about "
        "the login and personal data. "
        "The urgency is high if the customer cannot wait, low if the customer says that there is "
        "time, and normal if nothing is said about it. "
        'Answer with one JSON object with the keys "category" and "urgency", in that order, '
        "and write nothing before or after it."
    ),
    "invoice": (
        "Read the invoice and find its number, the total and the due date. "
        "The header lines may come in any order. "
        "The number begins with INV. "
        "The total is the last amount, with tax, and not the subtotal or the tax alone. "
        "The due date is the day on which the money must have arrived, and not the day on which "
        "the invoice was issued. "
        "Write the total without the currency, and the date as it is written in the invoice. "
        'Answer with one JSON object with the keys "invoice", "total" and "due", in that order, '
        "and write nothing before or after it."
    ),
    "order": (
        "Read the order and write the shipping label. "
        "The order may name the person who pays and the person who gets the goods. "
        "Only the person who gets the goods belongs on the label. "
        "The items, the prices and the notes of the customer are of no use here. "
        "Write the full name, then the street with its number, and then the town, with a comma "
        "and a space between them. "
        "Answer with one line of plain text that begins with the words Ship to, and write "
        "nothing before or after it."
    ),
    "log": (
        "Read the log lines and report the error. "
        "Each line holds the time, the level, the name of the service in brackets and a message. "
        "Exactly one of the lines has the level ERROR, and its message holds a code that begins "
        "with the letter E. "
        "Lines with the level INFO or WARN are part of normal work and must be left out of the "
        "report. "
        "Copy the time, the service and the code from the line with the error, without brackets. "
        'Answer with one JSON object with the keys "time", "service" and "code", in that order, '
        "and write nothing before or after it."
    ),
    "review": (
        "Read the product review and find the product and the sentiment. "
        "The product is the thing that was bought, written as in the review, without an article "
        "in front of it. "
        "The sentiment is positive if the customer is happy, negative if the customer is not, and "
        "mixed if the review praises one thing and complains about another. "
        "Remarks about the weather, the family or the day of the purchase do not count. "
        'Answer with one JSON object with the keys "product" and "sentiment", in that order, '
        "and write nothing before or after it."
    ),
    "contact": (
        "Read the message and collect the contact data of the person who wrote it. "
        "The person who wrote the message signs it at the end, with a name, an address for mail "
        "and a phone number. "
        "Other people may be named in the text, and their data must be left out. "
        "Copy each value letter by letter and digit by digit. "
        "Write the name, then the mail address in its brackets, a comma, and the phone number. "
        "Answer with one line of plain text, and write nothing before or after it."
    ),
    "meeting": (
        "Read the note and find out when and where the meeting takes place. "
        "Meetings are often moved, so the note may also name an old day, an old time or an old "
        "room. "
        "Only the new plan counts, and the old one must be left out. "
        "Write the date as year, month and day, the time with hours and minutes, and the room "
        "with its letter and its number, all of them as they stand in the note. "
        'Answer with one JSON object with the keys "date", "time" and "room", in that order, '
        "and write nothing before or after it."
    ),
}
TASKS = tuple(INSTRUCTIONS)


def words(text: str) -> list[str]:
    """The words of the text."""
    return text.split()


def phrases(text: str) -> list[str]:
    """The parts of the text between commas."""
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


@dataclass(frozen=True)
class Row:
    """One question: which task, the text it is about, and the expected answer."""

    task: str
    document: str
    answer: str


class Values:
    """Draws values that belong to one split only.

    A value belongs to the prompts if its checksum is a multiple of eight, and to the training
    text otherwise; this holds for each single word of a name, not only for the whole.
    """

    def __init__(self, seed: int, split: Split) -> None:
        self.rng = random.Random(f"{split}-{seed}")
        self._held_out = split == "prompts"

    def pick(self, choices: tuple[str, ...] | list[str]) -> str:
        """One of the choices; for words that both splits share."""
        return self.rng.choice(choices)

    def owns(self, value: str) -> bool:
        """Whether the value is on this split's side."""
        return (crc32(value.encode()) % 8 == 0) == self._held_out

    def draw(self, make: Callable[[], str]) -> str:
        """Call `make` until it gives a value on this split's side."""
        while not self.owns(value := make()):
            pass
        return value

    def join(self, *parts: list[str]) -> str:
        """A word made of one piece of each list."""
        return self.draw(lambda: "".join(self.pick(part) for part in parts))

    def digits(self, count: int) -> str:
        """A number with `count` digits; the first is not zero."""
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
        """A mail address for the first name of `name`; plain ASCII, as most addresses are."""
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


# Support tickets -------------------------------------------------------------------------------

PROBLEMS: dict[str, list[str]] = {
    "billing": [
        "I was charged twice for order {order}.",
        "The bill for {order} shows the wrong amount.",
        "My card was charged before {order} was confirmed.",
        "Please explain the extra fee on order {order}.",
    ],
    "delivery": [
        "My order {order} has not arrived yet.",
        "The parcel with order {order} has been on its way for two weeks.",
        "The tracking page for {order} has not changed for days.",
        "The courier left the parcel with {order} at the wrong door.",
    ],
    "returns": [
        "I would like to send back order {order}.",
        "How do I return order {order} and get a refund?",
        "The size is wrong, so I want to exchange order {order}.",
        "I sent {order} back and still wait for the refund.",
    ],
    "technical": [
        "The {product} from order {order} does not turn on.",
        "The {product} I got with {order} is broken.",
        "The {product} in order {order} stopped working after one day.",
        "There is a loud noise from the {product} of order {order}.",
    ],
    "account": [
        "I cannot log in to see order {order}.",
        "My password no longer works, and I need the papers for {order}.",
        "Please change the name on my account, the one used for {order}.",
        "Please delete my account and all data on order {order}.",
    ],
}
URGENCIES: dict[str, list[str]] = {
    "high": [
        "I need an answer today.",
        "This is urgent, please call me at once.",
        "We lose money every hour.",
        "Please hurry, we cannot wait.",
    ],
    "normal": [""],
    "low": [
        "There is no rush.",
        "Answer when you have time.",
        "This can wait until next week.",
        "Take all the time you need.",
    ],
}
SUBJECTS = phrases("A question, Please help, My order, Hello, Your shop, A short note")
GREETINGS = ["Hello,", "Dear team,", "Good morning,", "Hi,", "To whom it may concern,"]
CLOSINGS = ["Thank you,", "Kind regards,", "Best wishes,", "Thanks in advance,"]
ASIDES = [
    "I have been a customer for {small} years.",
    "Your page is easy to use.",
    "I looked at the help pages first.",
    "My neighbour had the same question.",
    "My customer number is {number}.",
    "My phone number is {phone}.",
    "I bought it on {date}.",
    "It was a present for my sister.",
    "I have told my colleague {person} about it.",
    "We live in {town} now.",
]


def sentences(values: Values, pool: list[str], most: int) -> list[str]:
    """Up to `most` different sentences of the pool, their places filled."""
    chosen = values.rng.sample(pool, values.rng.randrange(most + 1))
    return [
        text.format(
            small=values.rng.randrange(2, 10),
            number=values.number(5) if "{number}" in text else "",
            phone=values.phone() if "{phone}" in text else "",
            date=values.date() if "{date}" in text else "",
            person=values.person() if "{person}" in text else "",
            town=values.town() if "{town}" in text else "",
        )
        for text in chosen
    ]


def ticket_text(values: Values, name: str, order: str, category: str, urgency: str) -> str:
    """A support mail with a header, the problem, and remarks that do not matter."""
    problem = values.pick(PROBLEMS[category]).format(order=order, product=values.product())
    hurry = values.pick(URGENCIES[urgency])
    body = [problem, *sentences(values, ASIDES, 3), *([hurry] if hurry else [])]
    values.rng.shuffle(body)
    header = [f"Ticket {values.number(5)}", f"From: {name}", f"Subject: {values.pick(SUBJECTS)}"]
    first = name.split()[0]
    lines = [*header, values.pick(GREETINGS), " ".join(body), values.pick(CLOSINGS), first]
    return "\n".join(lines)


def make_ticket(values: Values) -> tuple[str, str]:
    name, order = values.person(), values.order()
    category, urgency = values.pick(list(PROBLEMS)), values.pick(list(URGENCIES))
    document = ticket_text(values, name, order, category, urgency)
    return document, json.dumps({"order": order, "customer": name}, ensure_ascii=False)


def make_triage(values: Values) -> tuple[str, str]:
    category, urgency = values.pick(list(PROBLEMS)), values.pick(list(URGENCIES))
    document = ticket_text(values, values.person(), values.order(), category, urgency)
    return document, json.dumps({"category": category, "urgency": urgency})


# Invoices and orders ---------------------------------------------------------------------------


def money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"


def make_invoice(values: Values) -> tuple[str, str]:
    """An invoice whose sums are right; drawn again until its total is on this split's side."""
    rng = values.rng
    while True:
        items = [
            (rng.randrange(1, 9), rng.randrange(150, 9000, 5)) for _ in range(rng.randrange(1, 4))
        ]
        subtotal = sum(count * price for count, price in items)
        tax = subtotal // 5
        if values.owns(money(subtotal + tax)):
            break
    number, due, total = values.invoice(), values.date(), money(subtotal + tax)
    issued = date.fromisoformat(due) - timedelta(days=rng.randrange(10, 60))
    header = [f"Invoice: {number}", f"Issued: {issued}", f"Due: {due}"]
    header += rng.sample([f"From: {values.company()}", f"To: {values.company()}"], rng.randrange(3))
    rng.shuffle(header)
    lines = [f"{count} x {values.product()} at {money(price)}" for count, price in items]
    sums = [f"Subtotal: {money(subtotal)}", f"Tax: {money(tax)}"]
    document = "\n".join([*header, *lines, *sums, f"Total: {total} {values.pick(CURRENCIES)}"])
    return document, json.dumps({"invoice": number, "total": total, "due": due})


NOTES = [
    "Please ring twice.",
    "Leave it with the neighbour.",
    "It is a gift.",
    "Please use less paper.",
    "Call {phone} before you come.",
    "Not before {date}.",
]


def make_order(values: Values) -> tuple[str, str]:
    """An order with a payer and a receiver in any sequence; only the receiver is asked for."""
    rng = values.rng
    label = f"{values.person()}, {values.street()}, {values.town()}"
    parties = [f"Deliver to: {label}"]
    if rng.random() < 0.6:
        parties.append(f"Paid by: {values.person()}, {values.street()}, {values.town()}")
    rng.shuffle(parties)
    items = [f"{rng.randrange(1, 9)} x {values.product()}" for _ in range(rng.randrange(1, 4))]
    notes = [f"Note: {text}" for text in sentences(values, NOTES, 2)]
    blocks = [parties, items, notes]
    rng.shuffle(blocks)
    lines = [line for block in blocks for line in block]
    return "\n".join([f"Order {values.order()}", *lines]), f"Ship to {label}"


# Logs, reviews, messages, meetings -------------------------------------------------------------

ROUTINE = [
    "INFO [{service}] request {number} done",
    "INFO [{service}] started",
    "INFO [{service}] cache is warm",
    "WARN [{service}] slow answer",
    "WARN [{service}] retry {small}",
    "INFO [{service}] saved {small} files",
]
FAILURES = [
    "ERROR [{service}] failed with {code}",
    "ERROR [{service}] {code} no connection",
    "ERROR [{service}] gave up, code {code}",
    "ERROR [{service}] {code} disk is full",
]


def make_log(values: Values) -> tuple[str, str]:
    """Log lines in order of time, exactly one of them an error."""
    rng = values.rng
    times = sorted({values.clock() for _ in range(rng.randrange(1, 7))})
    bad = rng.randrange(len(times))
    service, code = values.pick(SERVICES), values.draw(lambda: f"E{values.digits(4)}")
    lines = [
        f"{time} "
        + values.pick(ROUTINE).format(
            service=values.pick(SERVICES), number=values.number(4), small=rng.randrange(2, 10)
        )
        for time in times
    ]
    lines[bad] = f"{times[bad]} " + values.pick(FAILURES).format(service=service, code=code)
    return "\n".join(lines), json.dumps({"time": times[bad], "service": service, "code": code})


PRAISE = [
    "It looks lovely.",
    "The quality is excellent.",
    "It works very well.",
    "I am delighted with it.",
    "It was worth the money.",
    "I would buy it again.",
]
BLAME = [
    "It broke after a week.",
    "The finish is poor.",
    "It smells terrible.",
    "I am disappointed.",
    "It was far too expensive.",
    "I would not buy it again.",
]
PURCHASES = [
    "I bought the {product} last month.",
    "My {product} came on Monday.",
    "We got a {product} for the office.",
    "This is about the {product}.",
    "I have used the {product} for a while.",
]
SMALL_TALK = [
    "It rained all week.",
    "My brother came to visit.",
    "The shop in {town} was closed.",
    "I bought it on {date}.",
    "We have lived in {town} for {small} years.",
    "My colleague {person} told me about it.",
    "The parcel came in the afternoon.",
]


def make_review(values: Values) -> tuple[str, str]:
    sentiment = values.pick(["positive", "negative", "mixed"])
    rng, product = values.rng, values.product()
    if sentiment == "mixed":
        opinion = [values.pick(PRAISE), values.pick(BLAME)]
    else:
        opinion = rng.sample(PRAISE if sentiment == "positive" else BLAME, rng.randrange(1, 3))
    body = [values.pick(PURCHASES).format(product=product), *opinion]
    body += sentences(values, SMALL_TALK, 4)
    rng.shuffle(body)
    return " ".join(body), json.dumps({"product": product, "sentiment": sentiment})


NEWS = [
    "Thank you for the offer.",
    "The papers are on their way.",
    "I talked to {person} about the plan.",
    "Our office in {town} is closed on {date}.",
    "We need {small} copies of the report.",
    "Please send the next bill to our new address.",
    "If you cannot reach me, call {person} at {phone}.",
    "We hope to see you in {town}.",
]


def make_contact(values: Values) -> tuple[str, str]:
    """A message that names other people too, and ends with the writer's signature."""
    name, phone = values.person(), values.phone()
    email = values.email(name)
    body = " ".join([*sentences(values, NEWS, 4), "Please call me back."])
    signature = [f"Mail: <{email}>", f"Phone: {phone}"]
    values.rng.shuffle(signature)
    lines = [values.pick(GREETINGS), body, values.pick(CLOSINGS), name, *signature]
    return "\n".join(lines), f"{name} <{email}>, {phone}"


OLD_PLANS = [
    "It was planned for {date} at {time} in room {room}.",
    "Forget {date}.",
    "Room {room} is no longer free.",
    "It will not be at {time}.",
]
NEW_PLANS = [
    "The {topic} now takes place on {date} at {time} in room {room}.",
    "New plan: {topic} in room {room} on {date} at {time}.",
    "We now meet for the {topic} at {time} on {date}, room {room}.",
    "Please come to the {topic} on {date}, {time}, room {room}.",
]
TOPICS = phrases("budget review, team lunch, planning round, sales call, safety training, job talk")
REMARKS = [
    "Please bring your notes.",
    "Coffee will be served.",
    "{person} will join us.",
    "Tell me if you cannot come.",
    "My phone number is {phone}.",
    "We expect {small} guests.",
]


def make_meeting(values: Values) -> tuple[str, str]:
    """A note with the new plan, and often pieces of the old one."""
    new = {"date": values.date(), "time": values.time(), "room": values.room()}
    plan = values.pick(NEW_PLANS).format(topic=values.pick(TOPICS), **new)
    old = [
        text.format(date=values.date(), time=values.time(), room=values.room())
        for text in values.rng.sample(OLD_PLANS, values.rng.randrange(3))
    ]
    body = [plan, *old, *sentences(values, REMARKS, 3)]
    values.rng.shuffle(body)
    return f"{values.pick(GREETINGS)} {' '.join(body)}", json.dumps(new)


MAKERS: dict[str, Callable[[Values], tuple[str, str]]] = {
    "ticket": make_ticket,
    "triage": make_triage,
    "invoice": make_invoice,
    "order": make_order,
    "log": make_log,
    "review": make_review,
    "contact": make_contact,
    "meeting": make_meeting,
}


def make_row(values: Values, task: str) -> Row:
    """One row of the given task."""
    document, answer = MAKERS[task](values)
    return Row(task, document, answer)


def copying_row(values: Values) -> Row:
    """A few values to write down again: an exercise for the start of the training."""
    makers = [values.person, values.order, values.invoice, values.phone, values.date, values.room]
    makers += [values.clock, values.town, values.product, values.street, values.company]
    lines = [make() for make in values.rng.sample(makers, values.rng.randrange(1, 5))]
    return Row("copy", "\n".join(lines), "\n".join(lines))


def training_rows(seed: int) -> Iterator[Row]:
    """Training rows without end; the same seed gives the same rows."""
    values = Values(seed, "train")
    while True:
        yield make_row(values, values.pick(TASKS))


def prompts_table(seed: int = PROMPTS_SEED, num_rows: int = NUM_PROMPTS) -> pa.Table:
    """The rows of `prompts.parquet`: every task equally often, no document twice, shuffled."""
    values = Values(seed, "prompts")
    rows: dict[str, Row] = {}
    while len(rows) < num_rows:
        row = make_row(values, TASKS[len(rows) % len(TASKS)])
        rows.setdefault(row.document, row)
    shuffled = list(rows.values())
    values.rng.shuffle(shuffled)
    return pa.table(
        {
            "id": [f"q{number:05d}" for number in range(num_rows)],
            "task": [row.task for row in shuffled],
            "instruction": [INSTRUCTIONS[row.task] for row in shuffled],
            "document": [row.document for row in shuffled],
            "answer": [row.answer for row in shuffled],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the rows of the quickstart.")
    parser.add_argument("--output", type=Path, default=PROMPTS_PATH)
    parser.add_argument("--rows", type=int, default=NUM_PROMPTS)
    parser.add_argument("--seed", type=int, default=PROMPTS_SEED)
    args = parser.parse_args()
    table = prompts_table(args.seed, args.rows)
    pq.write_table(table, args.output, compression="zstd")
    print(f"{args.output}: {table.num_rows} rows, {args.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
