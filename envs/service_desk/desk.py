"""The desk: the tools' changes to the database, with an auditor that records every broken rule.

The desk does what it is told, as long as it is possible: following the policy is the agent's job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.utils.errors import ToolError
from agentrl.utils.parsing import deep_copy_json

from .policy import StorePolicy, broken_rules, money

Json = Any
_CONFIRMED = ("cancel", "return", "exchange", "address")


class Desk:
    """One conversation's database. `identified`: the customer looked up, `confirmed`: orders for which the
    customer has confirmed the next change, `violations`: rules that changes have broken."""

    def __init__(self, data: Mapping[str, Json], policy: StorePolicy) -> None:
        self.data: dict[str, Json] = deep_copy_json(dict(data))
        self.policy = policy
        self.identified: str | None = None
        self.confirmed: set[str] = set()
        self.violations: list[Json] = []

    def next_customer(self) -> None:
        """Somebody else comes, who has shown and confirmed nothing."""
        self.identified = None
        self.confirmed.clear()

    def find(self, customers: list[str]) -> Json:
        """Identify the one customer found. Raises ToolError if there is none."""
        if not customers:
            raise ToolError("no customer fits these details")
        self.identified = customers[0]
        return self.customer(customers[0])

    def customer(self, customer_id: str) -> Json:
        """A customer's record with the numbers of all orders. Raises ToolError for an unknown id."""
        if customer_id not in self.data["customers"]:
            raise ToolError(f"no customer {customer_id[:40]!r}")
        orders = [number for number, order in self.data["orders"].items() if order["customer"] == customer_id]
        return {"customer_id": customer_id, **self.data["customers"][customer_id], "orders": orders}

    def order(self, order_id: str) -> dict[str, Json]:
        """An order's record. Raises ToolError for an unknown number."""
        found: dict[str, Json] | None = self.data["orders"].get(order_id)
        if found is None:
            raise ToolError(f"no order {order_id[:40]!r}")
        return found

    def act(self, action: Mapping[str, Json]) -> str:
        """Carry out a change and audit it against the policy. Raises ToolError if it is impossible."""
        order = self.order(action["order"])
        if order["status"] == "cancelled":
            raise ToolError(f"order {action['order']} is cancelled")
        self._sense(order, action)
        for rule in self._broken(action):
            self.violations.append({"rule": rule, "kind": action["kind"], "order": action["order"]})
        self.confirmed.discard(action["order"])
        return _ACTS[action["kind"]](self, order, action)

    def refuse(self, order_id: str, rule: str) -> str:
        """Record a refusal; once per order and rule."""
        self.order(order_id)
        if self.identified is None:
            self.violations.append({"rule": "R1", "kind": "refusal", "order": order_id})
        entry = {"order": order_id, "rule": rule}
        if entry not in self.data["refusals"]:
            self.data["refusals"].append(entry)
        return "recorded"

    def export(self) -> dict[str, Json]:
        """The parts that can change, sorted so that they do not depend on the order of changes."""
        keep = {key: deep_copy_json(self.data[key]) for key in ("orders", "vouchers", "refusals", "transferred")}
        keep["vouchers"].sort(key=str)
        keep["refusals"].sort(key=str)
        return keep

    def _broken(self, action: Mapping[str, Json]) -> list[str]:
        found = broken_rules(self.policy, self.data, action)
        if self.identified is None:
            found.append("R1")
        elif self.data["orders"][action["order"]]["customer"] != self.identified:
            found.append("R2")
        if action["kind"] in _CONFIRMED and action["order"] not in self.confirmed:
            found.append("R10")
        return found

    def _sense(self, order: Mapping[str, Json], action: Mapping[str, Json]) -> None:
        kept = [item["sku"] for item in order["items"] if item["state"] == "kept"]
        wanted = action.get("skus", [])
        if len(set(wanted)) < len(wanted) or any(sku not in kept for sku in wanted):
            raise ToolError(f"order {action['order']} holds these items: {', '.join(kept) or 'none'}")
        if action["kind"] == "exchange":
            product = next(item["product"] for item in order["items"] if item["sku"] == wanted[0])
            variants = self.data["products"][product]["variants"]
            if action["new_sku"] not in variants or action["new_sku"] == wanted[0]:
                raise ToolError(f"another variant of {product} is one of: {', '.join(variants)}")


def _cancel(desk: Desk, order: dict[str, Json], action: Mapping[str, Json]) -> str:
    order["status"] = "cancelled"
    order["reason"] = action["reason"]
    order["refunds"].append({"amount": sum(item["price"] for item in order["items"]), "to": "original"})
    return f"order {action['order']} is cancelled; {money(order['refunds'][-1]['amount'])} will be paid back"


def _return(desk: Desk, order: dict[str, Json], action: Mapping[str, Json]) -> str:
    items = [item for item in order["items"] if item["sku"] in action["skus"] and item["state"] == "kept"]
    tier = desk.data["customers"][order["customer"]]["tier"]
    for item in items:
        item["state"] = "returned"
    amount = desk.policy.refund([item["price"] for item in items], tier)
    order["refunds"].append({"amount": amount, "to": action["refund_to"]})
    return f"return of order {action['order']} is booked"


def _exchange(desk: Desk, order: dict[str, Json], action: Mapping[str, Json]) -> str:
    item = next(item for item in order["items"] if item["sku"] == action["skus"][0] and item["state"] == "kept")
    variants = desk.data["products"][item["product"]]["variants"]
    new = variants[action["new_sku"]]
    new["stock"] -= 1
    item.update(sku=action["new_sku"], option=new["option"], price=new["price"])
    order["exchanged"] = True
    return f"exchange in order {action['order']} is booked"


def _address(desk: Desk, order: dict[str, Json], action: Mapping[str, Json]) -> str:
    order["address"] = action["address"]
    return f"order {action['order']} goes to {action['address']}"


def _voucher(desk: Desk, order: dict[str, Json], action: Mapping[str, Json]) -> str:
    order["voucher"] = True
    desk.data["vouchers"].append({"order": action["order"], "amount": desk.policy.voucher})
    return f"voucher of {money(desk.policy.voucher)} for order {action['order']} is issued"


_ACTS = {
    "cancel": _cancel,
    "return": _return,
    "exchange": _exchange,
    "address": _address,
    "voucher": _voucher,
}
