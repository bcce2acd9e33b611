"""LiteLLM: what its proxy does with `callbacks: knowgate.integrations.litellm.handler`. knowgate.toml has docs."""

import asyncio
import sys

from knowgate.core.frameworks import require_for_script

require_for_script("litellm", extra="litellm")

from knowgate.integrations.litellm import handler

for question in sys.argv[1:]:
    request = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": question}]}
    sent = asyncio.run(handler.async_pre_call_hook(None, None, request, "acompletion"))
    about = sent["metadata"]["knowgate"]
    print(question, about["retrieve"], "Mira" in sent["messages"][-1]["content"], sep=" | ")
