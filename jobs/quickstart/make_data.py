"""Generates the quickstart's rows: an office text, a question about it, and the correct answer.

Texts are generated from the templates in `office_documents.py`, so training needs no download and
each row's correct answer is known. Names, ids, amounts and dates (`office_values.py`) differ
between the training text and `prompts.parquet`, so a model can answer a prompt only by copying from
it.

    python jobs/quickstart/make_data.py        # writes jobs/quickstart/prompts.parquet
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from office_documents import MAKERS
from office_values import Values

HERE = Path(__file__).resolve().parent
PROMPTS_PATH = HERE / "prompts.parquet"
PROMPTS_SEED = 20_260
NUM_PROMPTS = 2_048

# Each task has one long instruction, so its rows share a prefix. The first sentence identifies the
# task.
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


@dataclass(frozen=True)
class Row:
    """A question: task, text and expected answer."""

    task: str
    document: str
    answer: str


def make_row(values: Values, task: str) -> Row:
    """Generate a row of a task."""
    document, answer = MAKERS[task](values)
    return Row(task, document, answer)


def copying_row(values: Values) -> Row:
    """Generate an exercise for the start of training: copy a few values."""
    makers = [values.person, values.order, values.invoice, values.phone, values.date, values.room]
    makers += [values.clock, values.town, values.product, values.street, values.company]
    lines = [make() for make in values.rng.sample(makers, values.rng.randrange(1, 5))]
    return Row("copy", "\n".join(lines), "\n".join(lines))


def training_rows(seed: int) -> Iterator[Row]:
    """Yield an endless sequence of training rows; equal seeds give equal rows."""
    values = Values(seed, "train")
    while True:
        yield make_row(values, values.pick(TASKS))


def prompts_table(seed: int = PROMPTS_SEED, num_rows: int = NUM_PROMPTS) -> pa.Table:
    """Return the shuffled rows of `prompts.parquet`: all tasks equally often, no document twice."""
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
