"use strict";
(function () {
  var plots = [];
  document.querySelectorAll("figure.chart").forEach(function (holder) {
    var figure = JSON.parse(holder.querySelector("script").textContent);
    var place = holder.querySelector(".plot");
    Plotly.newPlot(place, figure.data, figure.layout, { responsive: true, displayModeBar: false });
    plots.push(place);
  });
  function fit() {
    plots.forEach(function (place) { Plotly.Plots.resize(place); });
  }
  window.addEventListener("beforeprint", fit);
  window.addEventListener("afterprint", fit);
})();
