"""Convolutions as matrix products, for XLA's CPU backend, where many convolutions of training are slow.

On CPUs XLA is slow at convolutions whose weights are mapped over (as for the members of an ensemble), at convolutions
inside a loop, at few channels, and at the gradients of pooling; it is fast at large matrix products. Each file traces a
function and evaluates its program with products in place of convolutions:

- `as_products.py` rewrites a function that will not be differentiated again (`convolutions_as_products`): convolutions
  of any layout, grouping, stride, dilation and padding become one product each, pooling and its gradient become slices,
  and arrays keep the batch as their innermost axis from one operation to the next. In loops and with mapped weights all
  become products, elsewhere those at which XLA is slow (`Convolution.is_slow`);
- `in_scans.py` rewrites a function that will be differentiated inside a loop (`with_scannable_gradients`): forward
  convolutions stay if their layout is one at which XLA is fast, and only the derivatives become products, those of
  `by_rows.py` where they can.

`convolution.py` describes one convolution. `convolved` in `as_products.py` turns a convolution into a product, in one
of three ways: the weights times the patches of the input; the weights times the whole input, whose shifted parts, one
for each window position, are added up; or one slice of the input for each position of a small result. The choice
depends on the sizes of window, result and operands. If window and result both have many positions, it stays a
convolution. For the gradient of each example, see `privacy/_per_example/rules.py`.
"""
