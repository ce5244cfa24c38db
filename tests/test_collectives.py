from structinit_jax.training.collectives import bytes_by_kind

# Excerpts of a program for four H100s.
GPU_PROGRAM = """
%body (arg: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %part = f32[64,64]{1,0} parameter(0)
  %all-gather-start = (f32[64,64]{1,0}, f32[256,64]{1,0}) all-gather-start(%part), channel_id=1
  %all-gather-done = f32[256,64]{1,0} all-gather-done(%all-gather-start)
  %whole = bf16[256,64]{1,0} fusion(%all-gather-done), kind=kLoop, calls=%fused
  %reduce-scatter-start = (bf16[256,64]{1,0}, bf16[64,64]{1,0}) reduce-scatter-start(%whole)
  ROOT %reduce-scatter-done = bf16[64,64]{1,0} reduce-scatter-done(%reduce-scatter-start)
}

ENTRY %main (arg: f32[64,64]) -> f32[] {
  %arg = f32[64,64]{1,0} parameter(0)
  %while = (s32[], f32[64,64]) while(%arg), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
  %loss = f32[] fusion(%while), kind=kInput, calls=%sum
  %all-reduce-start = (f32[], f32[]) all-reduce-start(%loss, %loss), to_apply=%add
  ROOT %all-reduce-done = (f32[], f32[]) all-reduce-done(%all-reduce-start)
}
"""


def test_asynchronous_collectives_count_once_in_each_iteration_of_a_loop():
    elements = 12 * 256 * 64
    assert bytes_by_kind(GPU_PROGRAM) == {
        "all-gather": 4 * elements,
        "reduce-scatter": 2 * elements,
        "all-reduce": 2 * 4,
    }
