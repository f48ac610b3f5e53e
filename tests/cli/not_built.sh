# What comes later says so and creates nothing.
k=$FIXTURES/hf/kimi_linear_tiny
rc 4 verify $k --roundtrip megatron,tp=2; one_line; err 'not built yet'
rc 4 verify $k --forward --device cuda; one_line; err '--device cuda: not built yet'
rc 2 verify $k --device cpu; one_line; err '--device needs --forward'
rc 4 train --resume $k --data $k/config.json --steps 1 --device cuda; one_line; err '--device cuda: not built yet'
nothing_but
