"""The shop's database: products, customers and orders of one task, as plain JSON."""

from __future__ import annotations

import random
from datetime import date, timedelta
from typing import Any

from .policy import StorePolicy

Json = Any

_CATALOGUE = {
    "kettle": ("kitchen", "colour"), "toaster": ("kitchen", "colour"),
    "frying pan": ("kitchen", "size"), "desk lamp": ("lighting", "colour"),
    "floor lamp": ("lighting", "colour"), "night light": ("lighting", "shape"),
    "wool blanket": ("textiles", "colour"), "bath towel": ("textiles", "colour"),
    "pillow": ("textiles", "size"), "office chair": ("furniture", "colour"),
    "bookcase": ("furniture", "size"), "bar stool": ("furniture", "colour"),
    "hand drill": ("tools", "voltage"), "jigsaw": ("tools", "voltage"),
    "toolbox": ("tools", "size"), "garden hose": ("garden", "length"),
    "parasol": ("garden", "colour"), "plant pot": ("garden", "size"),
}  # fmt: skip
CATEGORIES = sorted({category for category, _ in _CATALOGUE.values()})
_OPTIONS = {
    "colour": ["red", "blue", "black", "white", "green", "yellow"],
    "size": ["small", "medium", "large", "extra large"],
    "shape": ["moon", "star", "cloud"],
    "voltage": ["12 volt", "18 volt", "36 volt"],
    "length": ["10 metre", "20 metre", "30 metre"],
}
_FIRST = """Ada Bela Carl Dora Emil Faye Gita Hugo Ines Jonas Kaya Liam Mina Nora Omar Pia Quin Rosa Sven
Tara Ugo Vera Wim Xenia Yara Zeno""".split()  # noqa: SIM905
_LAST = """Abbott Brandt Castle Dorsey Eklund Farrow Gibbs Holm Ivers Jansen Keller Lindt Moreau Novak
Orlov Parker Quigley Rossi Stein Tanaka Ueda Vance Weber Young Zeller""".split()  # noqa: SIM905
_STREETS = ["Mill Lane", "Station Road", "Park Street", "Harbour Way", "Chapel Hill", "Orchard Close"]
_TOWNS = ["Northam", "Easterly", "Westbrook", "Southsea", "Midvale"]
_STATUS = {"pending": 3, "packed": 2, "shipped": 2, "delivered": 8, "cancelled": 1}


def draw_shop(rng: random.Random, policy: StorePolicy, customers: int) -> dict[str, Json]:
    """A database with `customers` customers and three to five orders each."""
    products = {name: _product(rng, name, number) for number, name in enumerate(_CATALOGUE)}
    people: dict[str, Json] = {}
    orders: dict[str, Json] = {}
    emails: set[str] = set()
    numbers = rng.sample(range(1000, 9999), 5 * customers)
    for number in rng.sample(range(100, 100 + 9 * customers), customers):
        person = _customer(rng, emails)
        people[f"C{number}"] = person
        for _ in range(rng.randint(3, 5)):
            orders[f"W{numbers.pop()}"] = _order(rng, policy, f"C{number}", person, products)
    return {
        "products": products,
        "customers": people,
        "orders": orders,
        "refusals": [],
        "vouchers": [],
        "transferred": False,
    }


def draw_address(rng: random.Random) -> str:
    """Street, number and town on one line."""
    return f"{rng.randint(1, 99)} {rng.choice(_STREETS)}, {rng.choice(_TOWNS)}"


def _product(rng: random.Random, name: str, number: int) -> Json:
    category, option = _CATALOGUE[name]
    base = rng.randint(900, 9000)
    variants = {}
    for index, value in enumerate(rng.sample(_OPTIONS[option], 3)):
        price = base + rng.choice([0, 0, 250, 500])
        stock = rng.choice([0, rng.randint(1, 20)])
        variants[f"{number + 10}-{index}"] = {"option": value, "price": price, "stock": stock}
    return {"category": category, "option": option, "variants": variants}


def _customer(rng: random.Random, emails: set[str]) -> Json:
    while True:
        first, last = rng.choice(_FIRST), rng.choice(_LAST)
        email = f"{first.lower()}.{last.lower()}{rng.randint(1, 99)}@mail.example"
        if email not in emails:
            emails.add(email)
            break
    return {
        "name": f"{first} {last}",
        "email": email,
        "postcode": str(rng.randint(10000, 99999)),
        "address": draw_address(rng),
        "tier": rng.choice(["standard", "plus"]),
    }


def _order(rng: random.Random, policy: StorePolicy, customer: str, person: Json, products: dict[str, Json]) -> Json:
    today = date.fromisoformat(policy.today)
    status = rng.choices(list(_STATUS), list(_STATUS.values()))[0]
    # Dates around the end of the return window are made likely, so that the date has to be computed.
    age = rng.choice([rng.randint(1, 2 * policy.window), policy.window, policy.window + 1])
    delivered = today - timedelta(days=age) if status == "delivered" else None
    arrived = delivered or today
    promised = arrived - timedelta(days=rng.choice([-2, 0, 1, policy.late_days, policy.late_days + 1, 9]))
    items = []
    for name in rng.sample(list(products), rng.randint(1, 3)):
        sku = rng.choice(list(products[name]["variants"]))
        variant = products[name]["variants"][sku]
        items.append(
            {
                "sku": sku,
                "product": name,
                "option": variant["option"],
                "price": variant["price"],
                "state": "kept",
            }
        )
    return {
        "customer": customer,
        "status": status,
        "promised": promised.isoformat(),
        "delivered": delivered.isoformat() if delivered else None,
        "address": person["address"],
        "paid_with": rng.choice(["card", "card", "gift_card"]),
        "items": items,
        "exchanged": False,
        "voucher": False,
        "refunds": [],
    }
