"""Generates the quickstart's documents, one kind per task, with the correct answer to each."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, timedelta

from office_values import CURRENCIES, SERVICES, Values, phrases

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
    """Return up to `most` different sentences of the pool, with values filled in."""
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
    """Generate a support mail: a header, the problem, and irrelevant remarks."""
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
    """Generate an invoice with correct sums; repeat until its total belongs to the split."""
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
    """Generate an order with payer and receiver in random order; the answer is the receiver."""
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
    """Generate log lines in order of time, of which exactly one is an error."""
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
    """Generate a message that names several people and ends with the writer's signature."""
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
    """Generate a note with the new plan, and often parts of the old plan."""
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
