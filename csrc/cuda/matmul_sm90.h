#pragma once
#include "matmul.h"
