/* Attention in whichever dtype a step has; attention_items.h says how. */
#include "attention.h"

void attention_part(void *job, int part, struct team *team) {
    const struct attention *attention = job;
    if (attention->is_bf16)
        attention_bf16(attention, part, team);
    else
        attention_float(attention, part, team);
}

EXPORT void cbd_attention(struct attention *job, int threads) { team_run(attention_part, job, threads); }
