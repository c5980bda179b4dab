"""A service desk: a policy to follow, a database to change, a customer who wants more than is allowed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng
from agentrl.errors import ConfigError, TaskDataError
from agentrl.tool import tool
from agentrl.trajectory import Json

from .customer import Customer
from .desk import Desk
from .goals import Goal, Shares, draw_goals
from .gold import play_gold
from .policy import StorePolicy, draw_policy
from .shop import CATEGORIES, draw_shop
from .teacher import Teacher

OrderId = Annotated[str, Field(max_length=20)]
Reason = Literal["changed my mind", "ordered by mistake", "found it cheaper"]
RefundTo = Literal["original", "gift_card"]
Rule = Literal["R2", "R3", "R4", "R5", "R6", "R7", "R8", "R9"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A shop, its policy, a customer and their goals."""

    policy: StorePolicy
    shop: dict[str, Json]
    customer: str
    by_email: bool
    goals: list[Goal]

    def fingerprint(self) -> str:
        """What the desk has to decide: the goals, whose they are, and the figures in the policy."""
        goals = [[goal.action, goal.rule, goal.script["opening"]] for goal in self.goals]
        return json.dumps([self.shop["customers"][self.customer], goals, self.policy.to_json()])


class ServiceDesk(ToolEnv):
    """Serve a customer according to the policy: do what is allowed, refuse the rest, and tell the customer."""

    id = "agentrl/ServiceDesk-v0"
    reward = "service_desk"
    summary = "serve a simulated customer by a policy; reward = state x what was communicated x rules kept"
    order_free = False

    def __init__(
        self,
        *,
        goals: int | Sequence[int] = (1, 2),
        forbidden: float = 0.4,
        pushy: float = 0.5,
        forgetful: float = 0.3,
        customers: int = 6,
        **base: Any,
    ) -> None:
        """`goals`: a number or [lowest, highest] of requests, 1..4. Shares within 0..1: `forbidden` (goals
        that a rule forbids), `pushy` (of those, the customer insists after the first refusal), `forgetful` (the
        order number, or the email address, is not known). `customers` in the database: 2..100. Raises
        ConfigError for values outside these ranges."""
        super().__init__(**base)
        low, high = (goals, goals) if isinstance(goals, int) else (goals[0], goals[-1])
        if not 1 <= low <= high <= 4:
            raise ConfigError(f"service_desk: goals = {goals!r}; expected a number or [low, high] within 1..4")
        shares = {"forbidden": forbidden, "pushy": pushy, "forgetful": forgetful}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise ConfigError(f"service_desk: {name} = {share!r}; expected a share within 0..1")
        if not 2 <= customers <= 100:
            raise ConfigError(f"service_desk: customers = {customers!r}; expected 2..100")
        self.goals, self.customers = (low, high), customers
        self.shares = Shares(**shares)
        self.desk: Desk | None = None
        self.customer: Customer | None = None

    # -- tasks -------------------------------------------------------------------------------------

    def make_task(self, rng_seed: int, split: str) -> Task:
        scenario = draw(task_rng(self.id, split, rng_seed), split, self._propose, Scenario.fingerprint)
        person = scenario.shop["customers"][scenario.customer]
        identity = (
            f"My email address is {person['email']}."
            if scenario.by_email
            else f"My name is {person['name']}, my postcode {person['postcode']}."
        )
        script = {"identity": identity, "goals": [goal.script for goal in scenario.goals]}
        turns, desk, customer = play_gold(scenario, script)
        return Task(
            id=f"service_desk/{split}/{rng_seed}",
            seed=rng_seed,
            split=split,
            data={"policy": scenario.policy.to_json(), "shop": scenario.shop, "script": script},
            gold={
                "database": desk.export(),
                "heard": {"closed": len(scenario.goals), "figures": customer.figures},
                "turns": turns,
                "rules": [goal.rule for goal in scenario.goals],
            },
        )

    def _propose(self, rng: random.Random) -> Scenario:
        for _ in range(100):
            policy = draw_policy(rng, CATEGORIES)
            shop = draw_shop(rng, policy, self.customers)
            customer = rng.choice(list(shop["customers"]))
            goals = draw_goals(rng, policy, shop, customer, rng.randint(*self.goals), self.shares)
            if goals is not None:
                return Scenario(policy, shop, customer, rng.random() >= self.shares.forgetful, goals)
        raise TaskDataError("service_desk: none of 100 shops has goals of the wanted kind")

    def prompt(self, task: Task) -> list[Message]:
        policy = StorePolicy.from_json(task.data["policy"])
        return [Message("system", policy.text()), Message("user", Customer(task.data["script"]).open())]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        self.desk = Desk(task.data["shop"], StorePolicy.from_json(task.data["policy"]))
        self.customer = Customer(task.data["script"])

    def state(self) -> Json:
        customer = self.person
        return {
            "database": self.now.export(),
            "heard": {"closed": customer.closed, "figures": dict(customer.figures)},
            "violations": copy.deepcopy(self.now.violations),
        }

    async def user_reply(self, message: Message) -> list[Message] | None:
        reply, confirmed = self.person.hear(message.content)
        if confirmed is not None:
            self.now.confirmed.add(confirmed)
        return None if reply is None else [Message("user", reply)]

    @property
    def now(self) -> Desk:
        """The running episode's desk."""
        assert self.desk is not None
        return self.desk

    @property
    def person(self) -> Customer:
        """The running episode's customer."""
        assert self.customer is not None
        return self.customer

    # -- tools: looking up -------------------------------------------------------------------------

    @tool
    async def find_customer_by_email(self, email: str) -> Json:
        """Identify the customer by email address."""
        people = self.now.data["customers"].items()
        return self.now.find([number for number, row in people if row["email"] == email.strip().lower()])

    @tool
    async def find_customer_by_name(self, name: str, postcode: str) -> Json:
        """Identify the customer by full name and postcode."""
        wanted = name.strip().lower(), postcode.strip()
        people = self.now.data["customers"].items()
        return self.now.find([number for number, row in people if (row["name"].lower(), row["postcode"]) == wanted])

    @tool(read_only=True)
    async def get_customer(self, customer_id: str) -> Json:
        """A customer's record: tier, address, order numbers."""
        return self.now.customer(customer_id)

    @tool(read_only=True)
    async def get_order(self, order_id: OrderId) -> Json:
        """An order's record: status, dates, items with their SKUs and prices (in cents)."""
        return {"order_id": order_id, **self.now.order(order_id)}

    @tool(read_only=True)
    async def get_product(self, product: str) -> Json:
        """A product's category and variants: SKU, option, price (in cents), stock.

        Args:
            product: the product's name, such as "kettle"
        """
        found = self.now.data["products"].get(product.strip().lower())
        return found if found is not None else {"products": list(self.now.data["products"])}

    # -- tools: changing ---------------------------------------------------------------------------

    @tool(parallel=False)
    async def cancel_order(self, order_id: OrderId, reason: Reason) -> str:
        """Cancel a whole order."""
        return self.now.act({"kind": "cancel", "order": order_id, "reason": reason})

    @tool(parallel=False)
    async def return_items(
        self,
        order_id: OrderId,
        skus: Annotated[list[str], Field(min_length=1, max_length=10)],
        refund_to: RefundTo,
    ) -> str:
        """Book the return of items of an order."""
        return self.now.act({"kind": "return", "order": order_id, "skus": sorted(skus), "refund_to": refund_to})

    @tool(parallel=False)
    async def exchange_item(self, order_id: OrderId, sku: str, new_sku: str) -> str:
        """Exchange one item of an order for another variant of the same product."""
        return self.now.act({"kind": "exchange", "order": order_id, "skus": [sku], "new_sku": new_sku})

    @tool(parallel=False)
    async def change_address(self, order_id: OrderId, address: Annotated[str, Field(min_length=1, max_length=200)]) -> str:
        """Send an order to another address."""
        return self.now.act({"kind": "address", "order": order_id, "address": address.strip()})

    @tool(parallel=False)
    async def issue_voucher(self, order_id: OrderId) -> str:
        """Issue the voucher for a late order."""
        return self.now.act({"kind": "voucher", "order": order_id})

    @tool(parallel=False)
    async def log_refusal(self, order_id: OrderId, rule: Rule) -> str:
        """Record that a request about an order was refused, and the rule that forbids it."""
        return self.now.refuse(order_id, rule)

    @tool(parallel=False)
    async def transfer_to_human(self, summary: Annotated[str, Field(max_length=2000)]) -> str:
        """Hand the conversation over to a person; this ends it."""
        self.now.data["transferred"] = True
        self.person.hand_over()
        self.finish()
        return "handed over"

    # -- scripted policies -------------------------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        return [_message(turn) for turn in task.gold["turns"]]

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        return Teacher(rng, self.gold_turns(task), **params)


def _message(turn: dict[str, Json]) -> Message:
    if "text" in turn:
        return Message("assistant", turn["text"])
    return Message("assistant", tool_calls=(ToolCall(turn["name"], dict(turn["arguments"])),))
