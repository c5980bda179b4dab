"""The course of an episode: what its user said after each of the policy's turns, and which rounds that makes."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.trajectory import Message, Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeRounds:
    """`opening`: number of messages before the first turn. `said`: for each turn, the user's messages between it (and its
    results) and the next one. `rounds`: for each turn, the number of its round, from 0: a round ends where the user speaks."""

    opening: int
    said: list[list[Message]]
    rounds: list[int]


def turn_places(trajectory: Trajectory) -> list[int]:
    """Where the policy's turns stand among the messages: the last of role "assistant", since an opening history has some too."""
    spoken = [place for place, message in enumerate(trajectory.messages) if message.role == "assistant"]
    return spoken[max(0, len(spoken) - len(trajectory.turns)) :]


def course_of(trajectory: Trajectory) -> EpisodeRounds:
    """The rounds of the turns; an opening history has none. A record with fewer assistant messages than turns (no messages, say)
    is one round."""
    turns, messages = trajectory.turns, trajectory.messages
    places = turn_places(trajectory)
    if len(places) < len(turns):
        return EpisodeRounds(len(messages), [[] for _ in turns], [0] * len(turns))
    said: list[list[Message]] = []
    rounds: list[int] = []
    for number, place in enumerate(places):
        end = places[number + 1] if number + 1 < len(places) else len(messages)
        # Several messages of the user in a row are one turn of his: the policy did nothing in between.
        rounds.append(rounds[-1] + bool(said[-1]) if rounds else 0)
        said.append([message for message in messages[place + 1 : end] if message.role == "user"])
    return EpisodeRounds(places[0] if places else len(messages), said, rounds)
