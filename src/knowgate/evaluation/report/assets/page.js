"use strict";
(function () {
  // Lines of a picture are shown and hidden by their boxes.
  document.querySelectorAll("input[data-line]").forEach(function (box) {
    var line = box.closest("figure").querySelector('g[data-line="' + box.dataset.line + '"]');
    box.addEventListener("change", function () { line.classList.toggle("off", !box.checked); });
    line.classList.toggle("off", !box.checked);
  });

  // What is under the pointer is said beside it.
  document.querySelectorAll("figure svg[data-scale]").forEach(function (svg) {
    var scale = JSON.parse(svg.dataset.scale), figure = svg.closest("figure"), tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    tip.setAttribute("aria-hidden", "true");
    figure.appendChild(tip);
    function value(at, ends) { return ends[2] + (at - ends[0]) / (ends[1] - ends[0]) * (ends[3] - ends[2]); }
    function shown(number, isShare) { return isShare ? (100 * number).toFixed(1) + " %" : number.toFixed(2); }
    function nearest(x, y) {
      var best = null;
      svg.querySelectorAll("g[data-name]:not(.off) polyline").forEach(function (line) {
        for (var i = 0; i < line.points.numberOfItems; i++) {
          var point = line.points.getItem(i), far = Math.hypot(point.x - x, point.y - y);
          if (far < 24 && (!best || far < best.far)) {
            best = { far: far, point: point, name: line.parentNode.dataset.name };
          }
        }
      });
      return best && best.name + ": " + shown(value(best.point.y, scale.y), scale.shares[1]) + " " + scale.names[1] + " at " +
        shown(value(best.point.x, scale.x), scale.shares[0]);
    }
    svg.addEventListener("pointermove", function (event) {
      var box = svg.getBoundingClientRect(), size = svg.viewBox.baseVal, around = figure.getBoundingClientRect();
      var said = event.target.dataset.tip ||
        nearest((event.clientX - box.left) / box.width * size.width, (event.clientY - box.top) / box.height * size.height);
      tip.hidden = !said;
      tip.textContent = said || "";
      tip.style.left = Math.max(0, Math.min(event.clientX - around.left + 14, around.width - tip.offsetWidth)) + "px";
      tip.style.top = event.clientY - around.top + 18 + "px";
    });
    svg.addEventListener("pointerleave", function () { tip.hidden = true; });
  });

  // Tables are sorted by their heads and filtered by a word.
  function number(cell) {
    var found = cell && /[-+−]?\d[\d,]*(\.\d+)?(e-?\d+)?/.exec(cell.textContent);
    return found ? parseFloat(found[0].replace(/,/g, "").replace("−", "-")) : NaN;
  }
  function compare(column, isDown) {
    return function (first, second) {
      var a = first.cells[column], b = second.cells[column], x = number(a), y = number(b);
      if (column === 0 || (isNaN(x) && isNaN(y))) {
        return (isDown ? -1 : 1) * (a ? a.textContent : "").localeCompare(b ? b.textContent : "");
      }
      if (isNaN(x) || isNaN(y)) { return isNaN(x) ? 1 : -1; }
      return isDown ? y - x : x - y;
    };
  }
  document.querySelectorAll("table.sortable").forEach(function (table) {
    var heads = Array.from(table.tHead.rows[0].cells), body = table.tBodies[0];
    heads.forEach(function (head, column) {
      var button = document.createElement("button");
      button.type = "button";
      button.append.apply(button, Array.from(head.childNodes));
      head.appendChild(button);
      button.addEventListener("click", function () {
        var isDown = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : column > 0;
        heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        body.append.apply(body, Array.from(body.rows).sort(compare(column, isDown)));
      });
    });
    var label = document.createElement("label"), box = document.createElement("input");
    label.className = "filter";
    box.type = "search";
    label.append("Only rows that hold:", box);
    table.parentNode.before(label);
    box.addEventListener("input", function () {
      var wanted = box.value.toLowerCase();
      Array.from(body.rows).forEach(function (row) {
        row.hidden = row.cells[0].textContent.toLowerCase().indexOf(wanted) < 0;
      });
    });
  });

  // A link into a folded part opens it.
  function unfold() {
    var place = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (var part = place; part; part = part.parentElement) { if (part.tagName === "DETAILS") { part.open = true; } }
    if (place) { place.scrollIntoView(); }
  }
  window.addEventListener("hashchange", unfold);
  unfold();
})();
