import base64
import re
from xml.etree import ElementTree

import pytest

from knowgate.core.chart import Axis, ChartFrame, ChartPoint, Curve, embed_svg, fit_axis, render_line_chart, thin_points

FRAME = ChartFrame(Axis("retrieval rate"), Axis("accuracy"), width=300, height=240)


def polylines(svg):
    return re.findall(r'<polyline points="([^"]*)"', svg)


def test_points_lie_where_their_shares_say():
    # the field begins at 52, 14: half of 300 and of 240 further on; y grows downwards
    svg = render_line_chart([Curve("a", [ChartPoint(0, 0), ChartPoint(0.5, 0.5), ChartPoint(1, 1)])], FRAME)
    assert polylines(svg) == ["52.0,254.0 202.0,134.0 352.0,14.0"]


def test_an_axis_scales_values_from_low_to_high():
    frame = ChartFrame(Axis("x"), Axis("y", 0.5, 1.0), width=300, height=240)
    assert polylines(render_line_chart([Curve("a", [ChartPoint(0, 0.5), ChartPoint(1, 1)])], frame)) == [
        "52.0,254.0 352.0,14.0"
    ]


def test_a_mark_is_a_dot():
    svg = render_line_chart([Curve("a", [ChartPoint(0, 0)], mark=ChartPoint(0.25, 1.0))], FRAME)
    assert '<circle cx="127.0" cy="14.0"' in svg


def test_the_chart_is_well_formed_for_any_names():
    curves = [Curve('<script>alert(1)</script> & "co"', [ChartPoint(0, 0), ChartPoint(1, 1)], dashed=True)]
    root = ElementTree.fromstring(render_line_chart(curves, FRAME))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert '<script>alert(1)</script> & "co"' in texts
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))


def test_long_curves_are_thinned_and_keep_their_ends():
    points = [ChartPoint(step / 9999, 0) for step in range(10_000)]
    kept = thin_points(points)
    assert (len(kept), kept[0], kept[-1]) == (150, points[0], points[-1])


@pytest.mark.parametrize(
    ("values", "low", "high"), [([0.52, 0.68], 0.5, 0.7), ([0.5, 0.5], 0.5, 0.55), ([0.0, 1.0], 0.0, 1.0)]
)
def test_a_fitted_axis_ends_at_multiples_of_five_percent(values, low, high):
    axis = fit_axis("y", values)
    assert (axis.low, axis.high) == (pytest.approx(low), pytest.approx(high))


def test_an_embedded_svg_is_an_image_and_runs_no_script():
    shown = embed_svg("<svg><script>alert(1)</script></svg>", 'a "curve"')
    assert "<script>" not in shown
    assert 'alt="a &quot;curve&quot;"' in shown
    data = shown.partition("base64,")[2].partition('"')[0]
    assert base64.b64decode(data) == b"<svg><script>alert(1)</script></svg>"
