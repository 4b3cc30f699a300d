// Continues a text with a byte-level GPT-2 that export.py has packaged, with LibTorch but without Python.
//
//   generate model.pt2 TEXT COUNT libgptkernels.so [libgptkernels_cuda.so]

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace {

constexpr int64_t kFewestTokens = 2;  // must equal `min` in export.py

// libgptkernels.so, which declares all operators, must be loaded first.
void load_operators(const char* library) {
  if (dlopen(library, RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
}

at::Tensor tokens_of(const std::string& text, const at::Device& device) {
  at::Tensor tokens = at::empty({1, int64_t(text.size())}, at::kLong);
  for (size_t i = 0; i < text.size(); ++i) tokens.data_ptr<int64_t>()[i] = uint8_t(text[i]);
  return tokens.to(device);
}

void generate(const char* package, std::string text, int count) {
  torch::inductor::AOTIModelPackageLoader model(package);
  const at::Device device(model.get_metadata().at("AOTI_DEVICE_KEY"));
  for (int i = 0; i < count; ++i) {
    const at::Tensor logits = model.run({tokens_of(text, device)}).at(0);
    text += char(logits.argmax().item<int64_t>());
  }
  std::fwrite(text.data(), 1, text.size(), stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5 || std::string(argv[2]).size() < kFewestTokens) {
    std::fprintf(stderr, "usage: generate model.pt2 TEXT COUNT libgptkernels.so [libgptkernels_cuda.so]\n");
    return 2;
  }
  try {
    const c10::InferenceMode no_gradients;
    for (int i = 4; i < argc; ++i) load_operators(argv[i]);
    generate(argv[1], argv[2], std::atoi(argv[3]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "generate: %s\n", error.what());
    return 1;
  }
  return 0;
}
