"""The desk's policy: a text for the agent, and the same rules as code that checks every change."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

RULES = ("R1", "R2", "R3", "R4", "R5", "R6", "R7", "R8", "R9", "R10")
REASONS = ("changed my mind", "ordered by mistake", "found it cheaper")


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """The figures that differ from task to task. Times in whole days, amounts in cents."""

    today: str
    cancel: tuple[str, ...]
    window: int
    final_sale: tuple[str, ...]
    label_fee: int
    late_days: int
    voucher: int

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` is the inverse."""
        return asdict(self) | {"cancel": list(self.cancel), "final_sale": list(self.final_sale)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> StorePolicy:
        """Inverse of `to_json`."""
        return cls(**{**row, "cancel": tuple(row["cancel"]), "final_sale": tuple(row["final_sale"])})

    def days_since(self, day: str) -> int:
        """Days from `day` to today."""
        return (date.fromisoformat(self.today) - date.fromisoformat(day)).days

    def refund(self, prices: list[int], tier: str) -> int:
        """The refund for a return (rule R4), in cents."""
        return max(0, sum(prices) - (0 if tier == "plus" else self.label_fee))

    def text(self) -> str:
        """The policy as text for the agent."""
        return _TEXT.format(
            today=self.today,
            cancel=" or ".join(self.cancel),
            reasons=", ".join(f'"{reason}"' for reason in REASONS),
            window=self.window,
            sale=" and ".join(self.final_sale),
            fee=money(self.label_fee),
            late=self.late_days,
            voucher=money(self.voucher),
        )


def draw_policy(rng: random.Random, categories: list[str]) -> StorePolicy:
    """A random policy for a task, so that it has to be read."""
    return StorePolicy(
        today=date(2031, rng.randint(2, 12), rng.randint(1, 28)).isoformat(),
        cancel=rng.choice([("pending",), ("pending", "packed")]),
        window=rng.choice([10, 14, 21, 30, 45]),
        final_sale=tuple(sorted(rng.sample(categories, 2))),
        label_fee=rng.choice([0, 295, 495, 650]),
        late_days=rng.choice([2, 3, 5, 7]),
        voucher=rng.choice([500, 800, 1000, 1500]),
    )


def money(cents: int) -> str:
    """1234 -> "12.34"."""
    return f"{cents // 100}.{cents % 100:02d}"


def broken_rules(policy: StorePolicy, data: Mapping[str, Any], action: Mapping[str, Any]) -> list[str]:
    """The rules among R3 to R9 that a change of an order breaks.

    `data` is the database, `action` an object with "kind", "order" and the arguments of the kind.
    """
    order = data["orders"][action["order"]]
    found: list[str] = []
    if action["kind"] == "cancel" and (order["status"] not in policy.cancel or action["reason"] not in REASONS):
        found.append("R3")
    if action["kind"] in ("return", "exchange"):
        found += _item_rules(policy, data, order, action)
    if action["kind"] == "address" and order["status"] != "pending":
        found.append("R8")
    if action["kind"] == "voucher" and not _late_enough(policy, data, order):
        found.append("R9")
    return found


def _item_rules(policy: StorePolicy, data: Mapping[str, Any], order: Mapping[str, Any], action: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    if order["status"] != "delivered" or policy.days_since(order["delivered"]) > policy.window:
        found.append("R4")
    products = [data["products"][item["product"]] for item in order["items"] if item["sku"] in action["skus"]]
    if any(product["category"] in policy.final_sale for product in products):
        found.append("R5")
    if action["kind"] == "return":
        if order["paid_with"] == "gift_card" and action["refund_to"] != "gift_card":
            found.append("R6")
        return found
    variant = products[0]["variants"].get(action["new_sku"])
    if variant is None or variant["stock"] < 1 or order["exchanged"]:
        found.append("R7")
    return found


def _late_enough(policy: StorePolicy, data: Mapping[str, Any], order: Mapping[str, Any]) -> bool:
    if data["customers"][order["customer"]]["tier"] != "plus" or order["voucher"]:
        return False
    if order["status"] == "cancelled":
        return False
    arrived = order["delivered"] or policy.today
    late = (date.fromisoformat(arrived) - date.fromisoformat(order["promised"])).days
    return late > policy.late_days


_TEXT = """\
You work at the service desk of a household shop. Today is {today}. Help the customer with the tools, \
and keep to this policy; there are no exceptions.

R1. First identify the customer: ask for the email address, or for the full name and the postcode, and \
look the customer up with a find_customer tool. Without that, change and record nothing.
R2. Change only orders that belong to the identified customer, whatever the reason given.
R3. An order can be cancelled while its status is {cancel}. Ask for the reason; it must be one of \
{reasons}.
R4. Items can be returned or exchanged when the order was delivered at most {window} days ago. A return \
pays the price of the items less a label fee of {fee} per return; plus customers pay no label fee.
R5. Items of the categories {sale} are final sale: no return and no exchange.
R6. For a return ask where the refund shall go: to the original payment or to a gift card. An order paid \
with a gift card is refunded to a gift card only.
R7. An item can be exchanged for another variant of the same product that is in stock, once per order.
R8. The address of an order can be changed while its status is pending.
R9. A plus customer whose order arrived (or still has not arrived) more than {late} days after the \
promised day gets, on request, one voucher of {voucher} for that order. Nobody else gets a voucher.
R10. Before you cancel, return, exchange or change an address, tell the customer the order number and \
exactly what you will do (naming the items and the new variant) and ask for confirmation. Act only after \
a yes.
R11. What a rule forbids is not done: record it with log_refusal (the order and the rule) and tell the \
customer.
R12. Requests about anything but orders (personal data, legal matters, jobs) go to transfer_to_human; \
nothing else does. Finish the customer's other requests first.
R13. When the customer asks for an amount, name exactly that amount, as 12.34, and no other amount.

When a request is dealt with, say so in a reply without a question; the customer then goes on."""
