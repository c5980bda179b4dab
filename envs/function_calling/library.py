"""A library of functions, each with the text of a request for it: a verb phrase and a clause per argument.

A clause's value comes from a pool of (the user's wording, allowed values); a user says "an hour and a half"
and the function takes 90.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.data.trajectory import Json

Said = tuple[str, list[Json]]
Pool = Callable[[random.Random], Said]


@dataclass(frozen=True, slots=True, eq=False)
class Argument:
    """`clause` contains {} in place of the value."""

    name: str
    schema: dict[str, Json]
    clause: str
    pool: Pool
    required: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """`ask` starts the request; the clauses follow in the order of the arguments."""

    name: str
    domain: str
    description: str
    ask: str
    arguments: tuple[Argument, ...]

    def schema(self) -> dict[str, Json]:
        """The declaration in OpenAI's format."""
        parameters = {
            "type": "object",
            "properties": {argument.name: argument.schema for argument in self.arguments},
            "required": [argument.name for argument in self.arguments if argument.required],
        }
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def _one(*texts: str) -> Pool:
    return lambda rng: (lambda text: (text, [text]))(rng.choice(texts))


def _mapped(table: dict[str, Json]) -> Pool:
    return lambda rng: (lambda key: (key, [table[key]]))(rng.choice(list(table)))


def _number(low: int, high: int, step: int = 1) -> Pool:
    return lambda rng: (lambda n: (str(n), [n]))(rng.randrange(low, high + 1, step))


def _city(rng: random.Random) -> Said:
    known = {"New York": ["New York City", "NYC"], "Saint Petersburg": ["St. Petersburg"], "The Hague": ["Den Haag"]}
    city = rng.choice(["Lyon", "Bergen", "Porto", "Graz", "Turku", "Leeds", "Osaka", "Quito", "Tunis", "Perth", "Oslo", *known])
    return city, [city, *known.get(city, [])]


def _person(rng: random.Random) -> Said:
    name = rng.choice(["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gail", "Hugo", "Ines", "Jon", "Kay", "Leo", "Mia"])
    return name, [name]


def _day(rng: random.Random) -> Said:
    months = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
              "November", "December"]  # fmt: skip
    month, day, year = rng.randint(1, 12), rng.randint(1, 28), rng.choice((2026, 2027))
    return f"{day} {months[month - 1]} {year}", [f"{year}-{month:02}-{day:02}"]


def _clock(rng: random.Random) -> Said:
    hour, minute = rng.randint(0, 23), rng.choice((0, 15, 30, 45))
    said = f"{hour % 12 or 12}{f':{minute:02}' if minute else ''} {'am' if hour < 12 else 'pm'}"
    return said, [f"{hour:02}:{minute:02}", *([f"{hour}:{minute:02}"] if hour < 10 else [])]


def _minutes(rng: random.Random) -> Said:
    table = {"half an hour": 30, "an hour": 60, "an hour and a half": 90, "two hours": 120, "a quarter of an hour": 15}
    if rng.random() < 0.5:
        said = rng.choice(list(table))
        return said, [table[said]]
    number = rng.randrange(10, 180, 5)
    return f"{number} minutes", [number]


def _amount(rng: random.Random) -> Said:
    cents = rng.randrange(500, 90000)
    return (f"{cents / 100:.2f}", [cents / 100]) if rng.random() < 0.5 else (str(cents // 100), [cents // 100])


def _guests(rng: random.Random) -> Said:
    names = rng.sample(["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gail", "Hugo"], rng.randint(2, 3))
    orders: list[Json] = [names, names[::-1]] if len(names) == 2 else _orders(names)
    return " and ".join([", ".join(names[:-1]), names[-1]]), orders


def _orders(names: list[str]) -> list[Json]:
    a, b, c = names
    return [[a, b, c], [a, c, b], [b, a, c], [b, c, a], [c, a, b], [c, b, a]]


_CURRENCY: dict[str, Json] = {"euros": "EUR", "dollars": "USD", "yen": "JPY", "pounds": "GBP", "francs": "CHF"}
_LANGUAGE: dict[str, Json] = {"German": "de", "French": "fr", "Spanish": "es", "Finnish": "fi", "Italian": "it"}
_TEXT = _one("running late", "see you soon", "thanks for the help", "the keys are under the mat", "call me back",
             "the train is on time", "lunch is ready", "we won the match")  # fmt: skip
_ROOM = ["kitchen", "bedroom", "hall", "office", "bathroom"]


def _text(description: str, **extra: Json) -> dict[str, Json]:
    return {"type": "string", "description": description, **extra}


def _whole(description: str, **extra: Json) -> dict[str, Json]:
    return {"type": "integer", "description": description, **extra}


_DATE = _text("date as YYYY-MM-DD")
_TIME = _text("time of day as HH:MM, 24 hours")
A = Argument

FUNCTIONS: tuple[Function, ...] = (
    Function("get_forecast", "weather", "Weather forecast of a city for one day", "Tell me the weather", (
        A("city", _text("name of the city"), " in {}", _city),
        A("date", _DATE, " on {}", _day),
        A("unit", _text("unit of temperatures", enum=["celsius", "fahrenheit"], default="celsius"), " in {}",
          _mapped({"Fahrenheit": "fahrenheit"}), False))),
    Function("get_air_quality", "weather", "Air quality index of a city right now", "Check the air quality", (
        A("city", _text("name of the city"), " in {}", _city),
        A("pollutant", _text("one pollutant only", enum=["ozone", "dust", "soot"]), ", {} only",
          _one("ozone", "dust", "soot"), False))),
    Function("book_train", "travel", "Book a train ticket", "Book a train ticket", (
        A("origin", _text("city of departure"), " from {}", _city),
        A("destination", _text("city of arrival"), " to {}", _city),
        A("date", _DATE, " on {}", _day),
        A("seats", _whole("number of seats", default=1), " for {} people", _number(2, 8), False))),
    Function("search_flights", "travel", "Search flights between two cities", "Search flights", (
        A("origin", _text("city of departure"), " from {}", _city),
        A("destination", _text("city of arrival"), " to {}", _city),
        A("date", _DATE, " leaving on {}", _day),
        A("direct", {"type": "boolean", "description": "only flights without a stop", "default": False}, ", {}",
          _mapped({"without a stop": True}), False))),
    Function("book_hotel", "travel", "Book a hotel room", "Book a hotel room", (
        A("city", _text("name of the city"), " in {}", _city),
        A("check_in", _DATE, " from {}", _day),
        A("nights", _whole("number of nights"), " for {} nights", _number(2, 14)))),
    Function("create_event", "calendar", "Put an event into the calendar", "Put an event in my calendar", (
        A("title", _text("title of the event"), " called {}", _one("Review", "Dentist", "Choir", "Budget talk", "Chess")),
        A("date", _DATE, " on {}", _day),
        A("start", _TIME, " at {}", _clock),
        A("minutes", _whole("length in minutes", default=60), ", lasting {}", _minutes, False))),
    Function("set_reminder", "calendar", "Remind the user of something at a time", "Remind me", (
        A("text", _text("what to remind of"), " to {}", _one("water the plants", "call Ada", "buy bread", "stretch")),
        A("date", _DATE, " on {}", _day),
        A("time", _TIME, " at {}", _clock))),
    Function("invite_guests", "calendar", "Invite people to a gathering", "Send out invitations", (
        A("guests", {"type": "array", "items": {"type": "string"}, "description": "names of the guests"}, " to {}", _guests),
        A("date", _DATE, " for {}", _day))),
    Function("convert_currency", "money", "Convert an amount of money", "Convert", (
        A("amount", {"type": "number", "description": "amount to convert"}, " the amount of {}", _amount),
        A("source", _text("currency code, ISO 4217"), " from {}", _mapped(_CURRENCY)),
        A("target", _text("currency code, ISO 4217"), " to {}", _mapped({"Swedish kronor": "SEK", "zloty": "PLN"})))),
    Function("transfer_money", "money", "Transfer money to a person", "Transfer money", (
        A("recipient", _text("name of the recipient"), " to {}", _person),
        A("amount", {"type": "number", "description": "amount in euros"}, ", {} euros", _amount),
        A("note", _text("note on the transfer"), ", with the note '{}'", _one("rent", "tickets", "dinner"), False))),
    Function("set_thermostat", "home", "Set the temperature of a room", "Set the thermostat", (
        A("room", _text("which room", enum=_ROOM), " in the {}", _one(*_ROOM)),
        A("degrees", _whole("degrees Celsius"), " to {} degrees", _number(15, 26)))),
    Function("set_light", "home", "Set the brightness of the light in a room", "Set the light", (
        A("room", _text("which room", enum=_ROOM), " in the {}", _one(*_ROOM)),
        A("percent", _whole("brightness, 0 is off"), " to {} percent", _number(10, 100, 5)),
        A("color", _text("color of the light", enum=["warm", "cold"], default="warm"), ", {}", _one("cold"), False))),
    Function("play_music", "home", "Play music in a room", "Play some music", (
        A("genre", _text("genre of music"), " of the genre {}", _one("jazz", "salsa", "techno", "folk", "opera")),
        A("room", _text("which room", enum=_ROOM), " in the {}", _one(*_ROOM)),
        A("minutes", _whole("for how many minutes"), " for {}", _minutes, False))),
    Function("book_table", "food", "Reserve a table in a restaurant", "Reserve a table", (
        A("restaurant", _text("name of the restaurant"), " at {}", _one("Fig Leaf", "Blue Pot", "Old Mill", "Nine Bowls")),
        A("people", _whole("number of people"), " for {} people", _number(2, 12)),
        A("date", _DATE, " on {}", _day),
        A("time", _TIME, " at {}", _clock))),
    Function("order_pizza", "food", "Order pizzas of one kind", "Order pizza", (
        A("kind", _text("kind of pizza"), " of the kind {}", _one("margherita", "funghi", "hawaii", "diavola")),
        A("size", _text("size", enum=["small", "medium", "large"]), ", {} size", _one("small", "medium", "large")),
        A("count", _whole("how many", default=1), ", {} of them", _number(2, 6), False))),
    Function("find_recipe", "food", "Find a recipe with an ingredient", "Find a recipe", (
        A("ingredient", _text("main ingredient"), " with {}", _one("lentils", "salmon", "leek", "plums", "rice")),
        A("max_minutes", _whole("longest cooking time in minutes"), " that takes at most {}", _minutes, False))),
    Function("send_message", "talk", "Send a text message to a person", "Send a message", (
        A("recipient", _text("name of the recipient"), " to {}", _person),
        A("text", _text("text of the message, as given"), " saying '{}'", _TEXT))),
    Function("translate", "talk", "Translate a text", "Translate", (
        A("text", _text("text to translate, as given"), " the words '{}'", _TEXT),
        A("language", _text("target language, ISO 639-1 code"), " to {}", _mapped(_LANGUAGE)))),
    Function("log_run", "health", "Log a run", "Log a run", (
        A("kilometers", {"type": "number", "description": "distance"}, " of {} kilometers", _number(3, 30)),
        A("minutes", _whole("time in minutes"), " that took {}", _minutes),
        A("date", _DATE, " on {}", _day))),
    Function("log_weight", "health", "Log a body weight", "Log my weight", (
        A("kilograms", {"type": "number", "description": "weight"}, " of {} kilograms", _number(50, 110)),
        A("date", _DATE, " on {}", _day))),
)  # fmt: skip
