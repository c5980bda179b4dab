"""`agentrl env serve`: serve an environment's episodes, or its tools, to other programs."""

from __future__ import annotations

import argparse

from agentrl.cli.arguments import COMMANDS, check_read, whole_number
from agentrl.cli.env import reference, with_env
from agentrl.utils.errors import UserError
from agentrl.utils.terminal import say

PORT = 8100
EPISODES, IDLE, BODY = 1024, 3600.0, 16 << 20
"""Defaults of SessionLimits for `env serve`; repeated here, because importing it would load environments for every `--help`."""

SERVE_EPILOG = """examples:
  agentrl env serve key_value calls=4 --http              a server to train against, on 127.0.0.1:8100; prints its token
  agentrl env serve sql --http --host 0.0.0.0 --port 9000 --token-env SQL_TOKEN --max-episodes 256
  agentrl train run.toml env.url=http://HOST:9000 env.token_env=SQL_TOKEN       the run, on another machine
  agentrl env serve key_value --mcp                       its tools, over stdio, for any MCP client
  agentrl env serve key_value --mcp --http 8000           the same over HTTP
"""


@COMMANDS.register("env serve")
def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """serve its episodes or tools to other programs."""
    parser.epilog = SERVE_EPILOG
    with_env(parser)
    parser.add_argument("--mcp", action="store_true", help="serve its tools by the Model Context Protocol")
    parser.add_argument(
        "--http",
        type=int,
        nargs="?",
        const=PORT,
        metavar="PORT",
        help=f"serve its episodes for training (env.url) and OpenEnv's clients (default port {PORT}); with --mcp: over HTTP "
        "on 127.0.0.1 instead of stdio",
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, help="with --mcp: seed of the task (default 0)")
    parser.add_argument("--split", default="train", help="with --mcp: split of the task (default train)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: only this machine)")
    parser.add_argument("--port", type=int, help="port to listen on (0: a free one)")
    parser.add_argument(
        "--token-env", metavar="NAME", help="environment variable with the secret token (default: a new token, printed)"
    )
    parser.add_argument("--max-episodes", type=int, metavar="N", default=EPISODES, help=f"at a time (default {EPISODES})")
    parser.add_argument(
        "--idle-timeout",
        type=float,
        default=IDLE,
        metavar="S",
        help=f"seconds without a request after which an episode is closed (default {IDLE:g})",
    )
    parser.add_argument("--max-body", type=int, default=BODY, metavar="BYTES", help=f"limit of a request (default {BODY})")
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until the client leaves or Ctrl-C; returns the exit code."""
    ref = reference(args.env, args.params)
    if args.mcp:
        unread = ("host", "port", "token_env", "max_episodes", "idle_timeout", "max_body")
        check_read(args, unread, "it belongs to --http without --mcp (which serves one episode on 127.0.0.1). Leave it out")
        import asyncio

        from agentrl.contrib.remote_envs.mcp_server import serve_mcp

        asyncio.run(serve_mcp(ref.build(), seed=args.seed, split=args.split, port=args.http))
        return 0
    if args.http is None:
        raise UserError("agentrl env serve: give --http (its episodes, to train against) or --mcp (its tools, for MCP clients)")
    if args.http not in (PORT, args.port):
        check_read(args, ("port",), f"--http names port {args.http}. Leave one of the two out")
    check_read(args, ("seed", "split"), "it belongs to --mcp; a client of --http chooses its own tasks. Leave it out")
    from agentrl.contrib.remote_envs.server import EnvApp, EnvOffer, serve_http
    from agentrl.contrib.remote_envs.sessions import Secret, SessionLimits
    from agentrl.env.address import EnvRequest
    from agentrl.run.digests import env_digest

    for name in ("max_episodes", "idle_timeout", "max_body"):
        if getattr(args, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name):g}: expected more than 0")
    offer, secret = EnvOffer(ref, env_digest), Secret.of(args.token_env)
    offer.card(EnvRequest(ref.id))  # report invalid parameters now, not to a client
    app = EnvApp(offer, secret, SessionLimits(args.max_episodes, args.idle_timeout, args.max_body))

    def began(url: str) -> None:
        where = f"in {args.token_env}" if args.token_env else secret.token
        say(f"{ref.entry.id}: {url}   (env.url = {url!r}; Ctrl-C ends it)\ntoken: {where}", flush=True)
        say(f"for OpenEnv's clients: {url}/openenv/{secret.player}", flush=True)

    serve_http(app, args.host, args.http if args.port is None else args.port, began)
    return 0
