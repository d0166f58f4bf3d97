/* Attention over a pool of bfloat16: attention_items.h. */
#define IS_BF16 1
#include "attention_items.h"

void attention_bf16(const struct attention *job, int part, struct team *team) { attend_part(job, part, team); }
