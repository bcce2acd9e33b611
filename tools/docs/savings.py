"""The calculator on the page "How much would I save?": plain HTML and JavaScript around the recorded curve of the demo."""

from __future__ import annotations

import json

from knowgate.cli.demo.tour import read_demo_record

PAGE = """
<style>#savings input[type=number] {{ border: 1px solid #90a4ae; border-radius: 4px; padding: 2px 6px; width: 7em }}</style>
<div id="savings">
<p><label>Questions per month <input id="s-questions" type="number" value="100000" min="0" step="1000"></label></p>
<p><label>Price of a search <input id="s-search" type="number" value="0.005" min="0" step="0.001"></label>
<label>Price of an LLM call <input id="s-call" type="number" value="0.001" min="0" step="0.0005"></label></p>
<p><label>Seconds of a search <input id="s-seconds" type="number" value="0.8" min="0" step="0.1"></label>
<label>The judge needs a second LLM call <input id="s-second" type="checkbox" checked></label></p>
<p><label>Share of questions that are searched for <input id="s-share" type="range" min="0" max="{last}" value="1" step="1">
<output id="s-share-text"></output></label></p>
<p id="s-result" aria-live="polite"></p>
</div>
<script>
(function () {{
  const points = {points};
  const get = (id) => document.getElementById("s-" + id);
  const percent = (value) => (100 * value).toFixed(1) + " %";
  function update() {{
    const point = points[Number(get("share").value)], n = Number(get("questions").value);
    const saved = n * (1 - point.searched);
    const calls = point.searched < 1 && get("second").checked ? n * point.searched : 0;
    const money = saved * Number(get("search").value) - calls * Number(get("call").value);
    get("share-text").textContent = percent(point.searched);
    get("result").textContent =
      "Searches saved: " + Math.round(saved).toLocaleString() + " of " + n.toLocaleString() + ". " +
      "Additional LLM calls: " + Math.round(calls).toLocaleString() + ". " +
      (money >= 0 ? "Money saved: " : "Money lost: ") + Math.abs(money).toFixed(2) + " a month. " +
      "Waiting saved: " + Math.round(saved * Number(get("seconds").value) / 3600).toLocaleString() + " hours. " +
      "Right answers: " + percent(point.right) + ", " + (100 * point.gain).toFixed(1) + " points against always searching " +
      "(95 % interval " + (100 * point.low).toFixed(1) + " to " + (100 * point.high).toFixed(1) + ").";
  }}
  document.getElementById("savings").addEventListener("input", update);
  update();
}})();
</script>
"""


def markdown() -> str:
    """Return the calculator as HTML, which Markdown passes through."""
    record = read_demo_record()
    points = [
        {name: getattr(point, name) for name in ("searched", "right", "gain", "low", "high")} for point in record.points
    ]
    points.append({"searched": 1.0, "right": record.always, "gain": 0.0, "low": 0.0, "high": 0.0})
    return PAGE.format(points=json.dumps(points), last=len(points) - 1).strip().replace("\n\n", "\n")
