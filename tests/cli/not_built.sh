# What comes later says so and creates nothing.
k=$FIXTURES/hf/kimi_linear_tiny
rc 4 verify $k --roundtrip megatron,tp=2; one_line; err 'not built yet'
nothing_but
