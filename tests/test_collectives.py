from structinit_jax.training.collectives import bytes_by_kind, find_collectives

HLO = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %r = (f32[2,4]{1,0}, bf16[16]{0}) all-reduce-start(%x, %y), replica_groups={}, to_apply=%add
  ROOT %t = (s32[], f32[8]) tuple(%i, %d)
}

%outer.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %w = (s32[], f32[8]) while(%t), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
}

%endless (p: s32[]) -> s32[] {
  %c = pred[5]{0} collective-permute(%p), source_target_pairs={{0,1}}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w2 = (s32[], f32[8]) while(%t), condition=%c, body=%outer.1, \
backend_config={"known_trip_count":{"n":"2"}}
  %w3 = s32[] while(%t), condition=%c, body=%endless
  %g = (f32[16]{0}, f32[64]{0}) all-gather-start(%a), dimensions={0}, \
metadata={op_name="jit(step)/gather"}
  ROOT %g2 = f32[64]{0} all-gather-done(%g)
}
"""


def test_exchanges_of_asynchronous_programs_and_loops_are_counted():
    found = [collective[:3] for collective in find_collectives(HLO)]
    assert found == [
        ("all-reduce", 4 * 8 + 2 * 16, 6),
        ("collective-permute", 5, None),
        ("all-gather", 4 * 64, 1),
    ]
    assert bytes_by_kind(HLO) == {
        "all-reduce": 6 * (4 * 8 + 2 * 16),
        "collective-permute": 5,
        "all-gather": 4 * 64,
    }
