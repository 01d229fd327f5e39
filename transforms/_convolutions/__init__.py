"""Convolutions as matrix products, for XLA's CPU backend, which is slow at many of the convolutions of training.

XLA is slow there at convolutions whose weights are mapped over (as for the members of an ensemble), at convolutions
inside a loop, and at the gradients of both and of pooling; it is fast at large matrix products. Both files take a
function, trace it, and return a function of the same arguments whose program has products in place of convolutions:

- `as_products.py` rewrites a function that is not differentiated any more (`convolutions_as_products`): convolutions
  of any layout, grouping, stride, dilation and padding become one product each, pooling and its gradient become slices,
  and arrays keep the batch as their innermost axis from one operation to the next;
- `in_scans.py` rewrites a function that is yet to be differentiated inside a loop (`with_scannable_gradients`):
  forward convolutions stay where XLA is good at them, and only their derivatives are products.

`convolved` in `as_products.py` is the one place where a convolution becomes a product, in one of three ways: of the
weights with the patches of the input; of the weights with the whole input, added up shifted for each position of the
window; or one for each place of a small result. It takes the one that holds the fewest numbers. A convolution that
cannot be written as a product stays as it is. How the gradient of each example is formed is in
`privacy/_per_example/rules.py`.
"""
