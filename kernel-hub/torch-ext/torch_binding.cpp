// The operators are registered by ops/*.cpp, in the namespace TORCH_EXTENSION_NAME (-Dgptkernels=TORCH_EXTENSION_NAME).
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
