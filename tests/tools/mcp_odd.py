"""An MCP server for the tests that does what servers should not: odd names, bare data, secrets, sudden ends.

With ``--broken`` it tells its token and exits before it has said anything else; with ``--ends-once FILE`` it ends when
it is first asked for its tools, and makes that file.
"""

import json
import os
import sys
import time

TOKEN = os.environ.get("ODD_SETTING", "none")
NAMES = [
    *("bad.name/x", "bad name/x", "n" * 100, "n" * 99 + "m", ""),
    *("structured", "tell", "raise", "noise", "spew", "count", "pid", "die"),
]
count = 0


def text(said: str) -> dict:
    return {"content": [{"type": "text", "text": said}]}


def called(name: str, arguments: dict) -> dict:
    global count
    count += 1
    if name == "structured":
        return {"content": [], "structuredContent": {"n": 1, "token": TOKEN}}
    if name == "tell":
        return {**text(f"the token is {TOKEN}"), "isError": bool(arguments.get("as_error"))}
    if name == "raise":
        raise ValueError(f"refused for {TOKEN}")
    if name == "noise":
        print(f"noise {TOKEN}", flush=True)
    if name == "spew":
        for _ in range(100):
            print("spew", flush=True)
            sys.stderr.write("spew " * 20_000)
    if name == "pid":
        return text(str(os.getpid()))
    if name == "die":
        print(f"dying with {TOKEN}", file=sys.stderr, flush=True)
        os._exit(3)
    time.sleep(arguments.get("seconds", 0))
    return text(f"{name} {count}")


def answer(request: dict) -> dict:
    params = request.get("params") or {}
    if request["method"] == "initialize":
        about = {"name": "odd", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if request["method"] == "tools/list":
        if "--ends-once" in sys.argv and not os.path.exists(sys.argv[-1]):
            open(sys.argv[-1], "w").close()
            os._exit(3)
        schema = {"type": "object", "properties": {"seconds": {"type": "number", "description": f"not {TOKEN}"}}}
        schema["additionalProperties"] = True
        return {"tools": [{"name": n, "description": f"With {TOKEN}.", "inputSchema": schema} for n in NAMES]}
    if request["method"] == "tools/call":
        return called(params["name"], params.get("arguments") or {})
    raise ValueError("there is no such method")


def serve() -> None:
    if "--broken-late" in sys.argv:  # with its token at the place where its last thousand characters begin
        print("x" * 5_000_000 + TOKEN + "y" * (1000 - len(TOKEN) // 2), end="", file=sys.stderr)
        raise SystemExit(1)
    if "--broken" in sys.argv:
        print(f"cannot log in with {TOKEN}", file=sys.stderr)
        raise SystemExit(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            reply = {"jsonrpc": "2.0", "id": request["id"]}
            try:
                reply["result"] = answer(request)
            except ValueError as error:
                reply["error"] = {"code": -32000, "message": str(error)}
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    serve()
