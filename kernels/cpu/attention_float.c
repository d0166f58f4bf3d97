/* Attention over a pool of float32: attention_items.h. */
#define IS_BF16 0
#include "attention_items.h"

void attention_float(const struct attention *job, int part, struct team *team) { attend_part(job, part, team); }
