from structinit_jax.training import collectives

HLO = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %r = (f32[2,4]{1,0}, bf16[16]{0}) all-reduce-start(%x, %y), replica_groups={}, to_apply=%add
  %m = bf16[64]{0} fusion(%y), kind=kLoop, calls=%multiply
  %rd = (f32[2,4]{1,0}, bf16[16]{0}) all-reduce-done(%r)
  ROOT %t = (s32[], f32[8]) tuple(%i, %d)
}

%outer.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %w = (s32[], f32[8]) while(%t), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
}

%until_seven (p: s32[]) -> pred[] {
  %n = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[]{:T(512)} compare(%p, %n), direction=LT
}

%seven_times (p: s32[]) -> s32[] {
  %b = f32[]{:T(128)} collective-broadcast(%p), channel_id=7
}

%endless (p: s32[]) -> s32[] {
  %c = pred[5]{0} collective-permute(%p), source_target_pairs={{0,1}}
}

%wrapped (p: bf16[8]) -> bf16[2] {
  ROOT %s = bf16[2]{0} reduce-scatter(%p), channel_id=9, dimensions={0}
}

%fusion.1 (p: bf16[8]) -> bf16[32] {
  %f = bf16[32]{0} all-gather(%p), channel_id=4, frontend_attributes={chain_id="0"}
}

%fusion.2 (p: bf16[8]) -> bf16[32] {
  %h = bf16[32]{0} all-gather(%p), channel_id=4, frontend_attributes={chain_id="0"}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w2 = (s32[], f32[8]) while(%t), condition=%c, body=%outer.1, \
backend_config={"known_trip_count":{"n":"2"}}
  %w4 = s32[] while(%t), condition=%until_seven, body=%seven_times
  %w3 = s32[] while(%t), condition=%c, body=%endless
  %g = (f32[16]{0}, f32[64]{0}) all-gather-start(%a), dimensions={0}, \
metadata={op_name="jit(step)/gather"}
  %s2 = ((bf16[8]{0}), bf16[2]{0}) async-start(%x), calls=%wrapped
  %c2 = f32[128]{0} convolution(%a, %b), dim_labels=bf_io->bf
  %s3 = bf16[2]{0} async-done(%s2)
  %q = (f32[64]{0}, f32[8]{0}) reduce-scatter-start(%a), dimensions={0}
  %q2 = f32[8]{0} reduce-scatter-done(%q)
  %h2 = bf16[32]{0} fusion(%x), kind=kCustom, calls=%fusion.1
  %h3 = bf16[32]{0} fusion(%x), kind=kCustom, calls=%fusion.2
  %k = (f32[4]{0}, f32[4]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%a), channel_id=5
  %g2 = f32[64]{0} all-gather-done(%g)
  %i2 = f32[] fusion(%x), kind=kLoop, calls=%increment
  %b2 = f32[64]{0} custom-call(), custom_call_target="AllocateBuffer"
  %k2 = f32[4]{0} collective-permute-done(%k)
  ROOT %m2 = f32[64]{0} fusion(%g2), kind=kLoop, calls=%multiply.2
}
"""


def test_collectives_in_loops_count_as_often_as_they_run():
    traffic = collectives.traffic_by_kind(HLO)
    assert {kind: total for kind, (total, _, _) in traffic.items()} == {
        "all-reduce": 6 * (4 * 8 + 2 * 16),
        "collective-permute": 5 + 4 * 4,
        "collective-broadcast": 7 * 4,
        "reduce-scatter": 2 * 2 + 4 * 8,
        "all-gather": 4 * 64 + 2 * 32,
    }
    assert {kind: largest for kind, (_, _, largest) in traffic.items()} == {
        "all-reduce": 4 * 8 + 2 * 16,
        "collective-permute": 4 * 4,
        "collective-broadcast": 4,
        "reduce-scatter": 4 * 8,
        "all-gather": 4 * 64,
    }


def test_asynchronous_forms_overlap_with_enough_computation_before_their_end():
    traffic = collectives.traffic_by_kind(HLO)
    hidden = {kind: overlapped for kind, (_, overlapped, _) in traffic.items()}
    # One blocks, and the other only waits for a scalar.
    assert hidden.pop("collective-permute") == 0
    assert hidden.pop("collective-broadcast") == 0
    assert hidden.pop("reduce-scatter") == 2 * 2  # the other one ends at once
    assert all(hidden[kind] == traffic[kind].total for kind in hidden)


def test_the_description_is_in_mebibytes():
    program = """
  %r = f32[1048576]{0} all-reduce(%x)
  %s = f32[1048576]{0} all-reduce-start(%x)
  %f = f32[1048576]{0} fusion(%x), kind=kLoop, calls=%add
  %d = f32[1048576]{0} all-reduce-done(%s)
"""
    assert collectives.describe(program) == "all-reduce 8 MiB (50% overlapped)"
