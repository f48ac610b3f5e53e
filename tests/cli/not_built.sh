# What comes later, or is not on this machine, says so and creates nothing.
k=$FIXTURES/hf/kimi_linear_tiny
rc 4 verify $k --forward --device cuda; one_line; err '--device cuda: no CUDA (part|card)'
rc 2 verify $k --device cpu; one_line; err '--device needs --forward'
rc 2 verify $k --forward --dtype bf16; one_line; err '--dtype needs --device cuda'
rc 4 train --resume $k --data $k/config.json --steps 1 --device cuda; one_line; err '--device cuda: no CUDA (part|card)'
nothing_but
