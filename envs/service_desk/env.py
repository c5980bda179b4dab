"""A service desk: a policy to follow, a database to change, a customer who wants more than is allowed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.data.trajectory import Json
from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng, tool
from agentrl.utils.errors import ConfigError, TaskDataError
from agentrl.utils.parsing import deep_copy_json

from .desk import Desk
from .goals import Shares
from .policy import StorePolicy
from .shift import Callers, Shift, ShiftWish, draw_shift
from .teacher import Teacher

OrderId = Annotated[str, Field(max_length=20)]
Reason = Literal["changed my mind", "ordered by mistake", "found it cheaper"]
RefundTo = Literal["original", "gift_card"]
_SEVERAL = """
Several customers come, one after the other. Identify each one anew; what one of them confirmed does not hold for the next."""
Rule = Literal["R2", "R3", "R4", "R5", "R6", "R7", "R8", "R9"]


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
        calls: int | Sequence[int] | None = None,
        recalls: float = 0.0,
        **base: Any,
    ) -> None:
        """`goals`: a number or [lowest, highest] of requests of a customer, 1..4. Shares within 0..1: `forbidden` (goals
        that a rule forbids), `pushy` (of those, the customer insists after the first refusal), `forgetful` (the
        order number, or the email address, is not known). `customers` in the database: 2..100.
        `calls`: a number or [lowest, highest] of required calls, 10..200, for which as many customers come one after the other;
        without it, one comes. `recalls`: share of new addresses that a customer tells as those of one before, 0..1. Raises
        ConfigError for values outside these ranges."""
        super().__init__(**base)
        low, high = (goals, goals) if isinstance(goals, int) else (goals[0], goals[-1])
        if not 1 <= low <= high <= 4:
            raise ConfigError(f"service_desk: goals = {goals!r}; expected a number or [low, high] within 1..4")
        shares = {"forbidden": forbidden, "pushy": pushy, "forgetful": forgetful}
        for name, share in {**shares, "recalls": recalls}.items():
            if not 0 <= share <= 1:
                raise ConfigError(f"service_desk: {name} = {share!r}; expected a share within 0..1")
        if not 2 <= customers <= 100:
            raise ConfigError(f"service_desk: customers = {customers!r}; expected 2..100")
        many = None if calls is None else (calls, calls) if isinstance(calls, int) else (calls[0], calls[-1])
        if many is not None and not 10 <= many[0] <= many[1] <= 200:
            raise ConfigError(f"service_desk: calls = {calls!r}; expected a number or [low, high] within 10..200")
        if recalls and many is None:
            raise ConfigError(f"service_desk: recalls = {recalls!r} needs customers before; set `calls`")
        self.wish = ShiftWish((low, high), many, Shares(**shares), recalls, customers)
        self.desk: Desk | None = None
        self.customer: Callers | None = None

    # -- tasks -------------------------------------------------------------------------------------

    def make_task(self, rng_seed: int, split: str) -> Task:
        shift = draw(task_rng(self.id, split, rng_seed), split, self._propose, Shift.fingerprint)
        scripts = [visit.script for visit in shift.visits]
        several = {"scripts": scripts} if self.wish.calls is not None else {"script": scripts[0]}
        return Task(
            id=f"service_desk/{split}/{rng_seed}",
            seed=rng_seed,
            split=split,
            data={"policy": shift.policy.to_json(), "shop": shift.before, **several},
            gold={
                "database": shift.desk.export(),
                "heard": {"closed": len(shift.goals), "figures": shift.figures},
                "turns": shift.turns,
                "rules": [goal.rule for goal in shift.goals],
            },
        )

    def _propose(self, rng: random.Random) -> Shift:
        for _ in range(100):
            if (shift := draw_shift(rng, self.wish)) is not None:
                return shift
        raise TaskDataError("service_desk: none of 100 shops has goals of the wanted kind")

    def prompt(self, task: Task) -> list[Message]:
        policy = StorePolicy.from_json(task.data["policy"])
        text = policy.text() + (_SEVERAL if "scripts" in task.data else "")
        return [Message("system", text), Message("user", Callers(_scripts(task)).open())]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        self.desk = Desk(task.data["shop"], StorePolicy.from_json(task.data["policy"]))
        self.customer = Callers(_scripts(task))

    def state(self) -> Json:
        customer = self.person
        return {
            "database": self.now.export(),
            "heard": {"closed": customer.closed, "figures": dict(customer.figures)},
            "violations": deep_copy_json(self.now.violations),
        }

    async def user_reply(self, message: Message) -> list[Message] | None:
        number = self.person.number
        reply, confirmed = self.person.hear(message.content)
        if self.person.number != number:
            self.now.next_customer()
        if confirmed is not None:
            self.now.confirmed.add(confirmed)
        return None if reply is None else [Message("user", reply)]

    @property
    def now(self) -> Desk:
        """The running episode's desk."""
        assert self.desk is not None
        return self.desk

    @property
    def person(self) -> Callers:
        """The running episode's customers."""
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


def _scripts(task: Task) -> Sequence[dict[str, Json]]:
    return [task.data["script"]] if "script" in task.data else task.data["scripts"]


def _message(turn: dict[str, Json]) -> Message:
    if "text" in turn:
        return Message("assistant", turn["text"])
    return Message("assistant", tool_calls=(ToolCall(turn["name"], dict(turn["arguments"])),))
