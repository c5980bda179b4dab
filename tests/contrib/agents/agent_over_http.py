"""An agent of the standard library alone, so that it starts in no time: chat completions, and tools over MCP's HTTP."""

import json
import os
import sys
import urllib.request

BASE, KEY, MCP = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ.get("AGENTRL_MCP_URL", "")


def post(url: str, body: dict) -> dict:
    heads = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "Authorization": f"Bearer {KEY}",
    }
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), heads)) as answer:
        return json.load(answer)


def rpc(method: str, **params: object) -> dict:
    return post(MCP, {"jsonrpc": "2.0", "id": 1, "method": method, "params": params})["result"]


def main() -> None:
    task = json.loads(os.environ["AGENTRL_TASK"])
    assert task["prompt"] == os.environ["AGENTRL_PROMPT"]
    listed = rpc("tools/list")["tools"]
    tools = [
        {"type": "function", "function": {"name": t["name"], "description": t["description"], "parameters": t["inputSchema"]}}
        for t in listed
    ]
    assert tools == task["tools"], (tools, task["tools"])
    messages = task["messages"]
    while True:
        body = {"model": os.environ["AGENTRL_MODEL"], "messages": messages, "tools": tools}
        message = post(f"{BASE}/chat/completions", body)["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            print(message["content"])
            return
        for call in message["tool_calls"]:
            made = rpc("tools/call", name=call["function"]["name"], arguments=json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": made["content"][0]["text"]})


if __name__ == "__main__":
    main()
    if len(sys.argv) > 1:
        print("cannot save", file=sys.stderr)
        sys.exit(int(sys.argv[1]))
