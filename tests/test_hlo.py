import runpy
from pathlib import Path

import pytest

hlo = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "hlo.py"))

PROGRAM = """HloModule jit_step, is_scheduled=true

%take_layer (p: f32[12,100], i: s32[]) -> bf16[100] {
  %p = f32[12,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1,100]{1,0} dynamic-slice(%p, %i), dynamic_slice_sizes={1,100}
  %b = f32[100]{0} bitcast(%s)
  ROOT %c = bf16[100]{0} convert(%b)
}

%put_layer (p.1: f32[12,100], u: f32[1,100], i.1: s32[]) -> f32[12,100] {
  %p.1 = f32[12,100]{1,0} parameter(0)
  %u = f32[1,100]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  ROOT %d = f32[12,100]{1,0} dynamic-update-slice(%p.1, %u, %i.1)
}

%body (t: (s32[], f32[12,100])) -> (s32[], f32[12,100]) {
  %t = (s32[], f32[12,100]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %w = f32[12,100]{1,0} get-tuple-element(%t), index=1
  %f = bf16[100]{0} fusion(%w, %n), kind=kLoop, calls=%take_layer
  %g = (f32[1,100]{1,0}, s8[4096]{0}) custom-call(%f), custom_call_target="__cublas$lt$matmul"
  %h = f32[1,100]{1,0} get-tuple-element(%g), index=0
  %o = f32[12,100]{1,0} fusion(%w, %h, %n), kind=kLoop, calls=%put_layer
  ROOT %r = (s32[], f32[12,100]{1,0}) tuple(%n, %o)
}

%any_times (t.1: f32[10]) -> f32[10] {
  %t.1 = f32[10]{0} parameter(0)
  ROOT %k = f32[10]{0} copy(%t.1)
}

ENTRY %main (a: f32[12,100]) -> f32[10] {
  %a = f32[12,100]{1,0} parameter(0)
  %w1 = (s32[], f32[12,100]{1,0}) while(%a), condition=%c1, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
  %w2 = f32[10]{0} while(%a), condition=%c2, body=%any_times
  %q = (bf16[8,64]{1,0}, u8[0]{0}) custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %z = f32[10]{0} bitcast(%w2)
}
"""


def test_kernels_in_loops_count_as_often_as_they_run():
    cost = hlo["count"](PROGRAM, [2.5])
    assert cost[:-1] == (12, 1, 24, 2)  # products, attention, fusions, others
    assert cost.kernels == 39


def test_slices_count_instead_of_the_arrays_they_are_part_of():
    take, product, put = 400 + 4 + 200, 200 + 400, 400 + 4 + 400
    copy, attention = 2.5 * 80, 4800 + 1024
    expected = 12 * (take + product + put) + copy + attention
    assert hlo["count"](PROGRAM, [2.5]).num_bytes == expected


def test_loops_of_unknown_length_are_not_guessed():
    with pytest.raises(ValueError, match="length of w2"):
        hlo["count"](PROGRAM)
