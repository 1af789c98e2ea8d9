// Runs a downloaded TorchScript model: run_model script.pt 1 512
// The numbers are the shape of the input, which is filled with ones; the output is printed.
#include <torch/script.h>

#include <iostream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: run_model MODEL.pt DIMENSION...\n";
    return 2;
  }
  std::vector<int64_t> shape;
  for (int i = 2; i < argc; ++i) shape.push_back(std::stoll(argv[i]));
  try {
    c10::InferenceMode inference;
    torch::jit::Module model = torch::jit::load(argv[1], torch::kCPU);
    model.eval();
    at::Tensor output = model.forward({torch::ones(shape)}).toTensor().contiguous();
    std::cout.precision(9);
    const float* values = output.data_ptr<float>();
    for (int64_t i = 0; i < output.numel(); ++i) std::cout << values[i] << "\n";
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  }
}
