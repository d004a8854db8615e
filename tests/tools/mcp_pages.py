"""An MCP server for the tests that lists its tools page by page; with ``--endless`` it gives one page for ever."""

import json
import sys

PAGES = {None: ("first", "2"), "2": ("second", "3"), "3": ("third", None)}


def answer(request: dict) -> dict:
    params = request.get("params") or {}
    if request["method"] == "initialize":
        about = {"name": "pages", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    name, following = PAGES[params.get("cursor")]
    shown = {"tools": [{"name": name, "inputSchema": {"type": "object"}}]}
    following = "2" if "--endless" in sys.argv else following
    return {**shown, "nextCursor": following} if following else shown


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            reply = {"jsonrpc": "2.0", "id": request["id"]}
            if request["method"] in ("initialize", "tools/list"):
                reply["result"] = answer(request)
            else:
                reply["error"] = {"code": -32601, "message": "there is no such method"}
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    serve()
