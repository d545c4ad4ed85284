// What unscale.cu does with the kernels of unscale_device.h, with the host in the place of the device; for
// test_unscale_on_host.py.
#include "cuda_on_host.h"
#include "unscale_device.h"

namespace amplab::unscale_cuda {

struct Call {
  int32_t write, input_dtype, output_dtype, in_place, count;
  uint32_t most_blocks;
  const void** inputs;
  void** outputs;
  const int64_t* numels;
  const int32_t* places;
  Findings findings;
  const Layout* layout;
  int32_t launches;
};

template <int kPointers, class Kernel>
void run(Call& call, const LaunchTable<kPointers>& table, uint32_t blocks, const Kernel& kernel) {
  ++call.launches;
  Findings findings = call.findings;
  const bool measures = findings.norm || findings.norms || findings.factor;
  std::vector<double> squares(table.count + 2 * blocks, NAN);  // poison: what is not written is read as NaN
  if (measures) {
    findings.piece_squares = squares.data();
    findings.block_squares = squares.data() + table.count + blocks;
  }
  on_host::launch(blocks, kThreads, [&] { kernel(table, findings); });
  if (measures) {
    constexpr int kWarps = kThreads / kWarp;
    on_host::launch(1 + (table.count + kWarps - 1) / kWarps, kThreads,
                    [&] { finish_kernel<kPointers>(table, blocks, findings); });
  }
}

template <Write write>
void run_strided(Call& call) {
  TableFiller<2> filler(call.most_blocks, [&](const LaunchTable<2>& table, uint32_t blocks) {
    run(call, table, blocks, [&](const auto& t, const Findings& f) { strided_kernel<write>(t, *call.layout, f); });
  });
  filler.add({call.inputs[0], call.outputs[0]}, call.numels[0], call.places[0]);
  filler.flush();
}

template <Write write, class In, class Out, int kPointers>
void run_pair(Call& call) {
  TableFiller<kPointers> filler(call.most_blocks, [&](const LaunchTable<kPointers>& table, uint32_t blocks) {
    run(call, table, blocks, [](const auto& t, const Findings& f) { unscale_kernel<write, In, Out, kPointers>(t, f); });
  });
  for (int i = 0; i < call.count; ++i) {
    if constexpr (kPointers == 1) {
      filler.add({call.inputs[i]}, call.numels[i], call.places[i]);
    } else {
      filler.add({call.inputs[i], call.outputs[i]}, call.numels[i], call.places[i]);
    }
  }
  filler.flush();
}

template <Write write>
void run_any(Call& call) {
  if (call.layout != nullptr) {
    return run_strided<write>(call);
  }
  with_type(call.input_dtype, [&](auto in) {
    if (call.in_place) {
      return run_pair<write, decltype(in), decltype(in), 1>(call);
    }
    if constexpr (write != Write::nothing) {
      with_type(call.output_dtype, [&](auto out) { run_pair<write, decltype(in), decltype(out), 2>(call); });
    }
  });
}

extern "C" void run_call(Call* call) {
  switch (call->write) {
    case 0: return run_any<Write::replace>(*call);
    case 1: return run_any<Write::accumulate>(*call);
    default: return run_any<Write::nothing>(*call);
  }
}

}  // namespace amplab::unscale_cuda
