"""Texts that would do something if a page ever took them for more than text, put into every field of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verifiers.store import RunDir

# Whoever gets to run calls hit(), or asks another host for something.
PAYLOADS = (
    "<script>hit()</script>",
    "<img src=x onerror=hit()>",
    '"><svg onload=hit()>',
    "'><body onload=hit()>",
    "</script><script>hit()</script>",
    "</style><script>hit()</script>",
    "</title></textarea><script>hit()</script>",
    "<!--<script>hit()//-->",
    "<scr<script>ipt>hit()</scr</script>ipt>",
    "javascript:hit()",
    "data:text/html,<script>hit()</script>",
    "<a href=javascript:hit()>x</a>",
    "<iframe srcdoc='<script>parent.hit()</script>'></iframe>",
    "<iframe src=//evil.example></iframe>",
    "<object data=//evil.example></object>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<style>@import url(//evil.example/x.css)</style>",
    "<base href=//evil.example/>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<form action=//evil.example><button autofocus onfocus=hit()>",
    "<details open ontoggle=hit()>",
    "<math><mtext></p><style><img src=x onerror=hit()></style>",
    "<template><script>hit()</script></template>",
    "{{constructor.constructor('hit()')()}}",
    "${hit()}",
    "`-hit()-`",
    "';hit();//",
    "\\u003cscript\\u003ehit()\\u003c/script\\u003e",
    "&lt;script&gt;hit()&lt;/script&gt;",
    "%3Cscript%3Ehit()%3C/script%3E",
    "url(//evil.example/x.png)",
    "expression(hit())",
    "__proto__",
    "constructor",
    "toString",
    "../../../../etc/passwd",
    "https://evil.example/?leak",
    "\u202egnp.exe\u202c",
    "\u2066\u2067\u061c\u200b\ufeff\u00ad",
    "\x1b]0;title\x07\x1b[31mred\x1b[0m\x00\x7f\x9b31m",
    "\u2028hit()\u2029hit()",
    "\U000e0041\U000e0042",
    "🏳️‍🌈 👩‍💻",
    "]]>",
    "-->",
    "\r\nContent-Type: text/html\r\n\r\n<script>hit()</script>",
    # What would be more than text in markdown.
    "[x](javascript:hit())",
    "[x](JaVaScRiPt&colon;hit())",
    "[x](\tjavascript:hit())",
    "[a](<javascript:hit()>)",
    "[x](data:text/html,<script>hit()</script>)",
    '[x](https://evil.example "onmouseover=hit()")',
    '[x](https://evil.example/" onmouseover="hit())',
    "[<img src=x onerror=hit()>](https://evil.example)",
    "[x]: javascript:hit()",
    "<javascript:hit()> <https://evil.example>",
    "![x](https://evil.example/leak.png)",
    "![x](javascript:hit())",
    '![<script>hit()</script>](x" onerror="hit())',
    "[![x](//evil.example/a.png)](javascript:hit())",
    "# <script>hit()</script>",
    "> <svg onload=hit()>",
    "- [ ] <iframe src=//evil.example></iframe>",
    "**<b onmouseover=hit()>x</b>** __<script>hit()</script>__",
    "`<script>hit()</script>` ``` `` <img src=x onerror=hit()> `` ```",
    '```html" onmouseover="hit()\n</code></pre><script>hit()</script>\n```',
    "~~~<script>hit()</script>\n</pre><img src=x onerror=hit()>\n~~~",
    "| <script>hit()</script> | [x](javascript:hit()) |\n|---|---|\n| <img src=x onerror=hit()> | ![x](//evil) |",
    "    <script>hit()</script>",
    "$\\href{javascript:hit()}{x}$ \\(\\unicode{<img src=x onerror=hit()>}\\)",
)
TEXT = "\n".join(PAYLOADS)
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def hostile_run(root: Path, name: str, *, shift: int = 0) -> Path:
    """A run in which everything that can be a text is one of them."""
    path = root / f"hostile{shift}" / name
    run = RunDir.create_at(path, env_id=PAYLOADS[shift % 8] + TEXT, model=PAYLOADS[1] + TEXT, config={TEXT: TEXT})
    with run.appender() as out:
        for i, payload in enumerate(PAYLOADS):
            out.append(record_of(payload, i, shift))
    about = {"kind": TEXT, "date": TEXT, "sampling_args": {TEXT: TEXT}, "num_rollouts": len(PAYLOADS)}
    run.update_metadata({**about, "tags": [*PAYLOADS[:3], 7], "note": TEXT, "reward_weights": {PAYLOADS[0]: 1.0}})
    return path


def record_of(payload: str, i: int, shift: int) -> dict[str, Any]:
    error = {"type": payload, "blame": payload, "message": TEXT, "cause": payload, "traceback": TEXT}
    call = {"id": payload, "type": "function", "function": {"name": payload, "arguments": json.dumps({payload: TEXT})}}
    return {
        "example_id": f"{payload}{i}",
        "rollout": 0,
        "task": payload,
        "prompt": [{"role": payload, "name": payload, "content": TEXT}, {"role": "user", "content": [*parts(payload)]}],
        "completion": [
            {
                "role": "assistant",
                "content": f"{TEXT}{shift}",
                "reasoning_content": TEXT,
                "tool_calls": [call, payload],
            },
            {"role": "tool", "name": payload, "tool_call_id": payload, "content": TEXT},
            payload,
        ],
        "answer": TEXT,
        "info": {payload: TEXT},
        "reward": None if i % 5 == 0 else (i + shift) / 50,
        "error": error if i % 5 == 0 else {**error, "blame": "policy"} if i % 5 == 1 else None,
        "metrics": {payload: 1.0, PAYLOADS[0]: 0.5, "__proto__": 0.1},
        "generation_ms": 5.0,
        "scoring_ms": 1.0,
        "total_ms": 6.0,
        "stop_condition": payload,
        "is_truncated": True,
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, payload: payload},
        "judge_response": {TEXT: TEXT, payload: {payload: payload}},
        "trajectory": [{"tokens": {"completion_ids": [1, 2], "completion_logprobs": [-0.1, -2.0]}}] * 2,
        payload: TEXT,
    }


def parts(payload: str) -> list[Any]:
    return [
        {"type": "text", "text": TEXT},
        {"type": "image_url", "image_url": {"url": "https://evil.example/leak.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg onload=hit()>"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{payload}"}},
        {"type": "image_url", "image_url": {"url": PIXEL}},
        {"type": payload, payload: payload},
        payload,
    ]


def hostile_training(root: Path, name: str) -> Path:
    path = root / "hostile-training" / name
    run = RunDir.create_at(path, env_id=TEXT, model=TEXT, config={TEXT: TEXT, "name": name})
    run.update_metadata({"reward_weights": {PAYLOADS[0]: 1.0, "constructor": 2.0, TEXT: TEXT}})
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "reward": 0.1 * step,
            "reward_low": 0.0,
            "reward_high": 0.5,
            TEXT: step,
            "kl": None,
            "samples": 4,
        }
        | {"metrics": dict.fromkeys(PAYLOADS, 1.0)}
        for step in range(1, 6)
    ]
    lines += [{"step": 3, "notice": payload} for payload in PAYLOADS]
    lines += [{"step": 4, "eval": {"reward": 0.4, "low": TEXT, "high": TEXT, "metrics": {TEXT: TEXT}}}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with run.appender() as out:
        for i, payload in enumerate(PAYLOADS):
            record = {**record_of(payload, i, 0), "step": 1 + i % 3, "advantage": 0.5, "trajectory": None}
            out.append({**record, "sampled_tokens": [{"ids": [1, 2], "logprobs": [-0.1, TEXT], "ratios": [1.2, 0.9]}]})
    return path
