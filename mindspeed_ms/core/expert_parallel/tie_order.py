"""Order of equal elements in torch's `topk` on CPU, which Megatron's drop policy "position" follows.

That policy calls `topk` on zeros and ones: which of the ones are kept is decided by the order in which torch leaves equal
elements, that of libstdc++'s `nth_element` (or `partial_sort` where few are kept). The same steps are taken here.
"""

from mindspeed_ms.core.compiled import compiled

_ROOM = "expert_parallel"
_FEW = 64  # torch sorts partially if count * 64 <= length


def _swap(values, indices, a, b):
    values[a], values[b] = values[b], values[a]
    indices[a], indices[b] = indices[b], indices[a]


_swap = compiled(_swap, _ROOM)


def _sift(values, indices, first, hole, length, value, index):
    """libstdc++'s `__adjust_heap` under the order "greater": the smallest element is at the top."""
    top, child = hole, hole
    while child < (length - 1) // 2:
        child = 2 * (child + 1)
        if values[first + child] > values[first + child - 1]:
            child -= 1
        values[first + hole], indices[first + hole] = values[first + child], indices[first + child]
        hole = child
    if length % 2 == 0 and child == (length - 2) // 2:
        child = 2 * (child + 1)
        values[first + hole], indices[first + hole] = values[first + child - 1], indices[first + child - 1]
        hole = child - 1
    parent = (hole - 1) // 2
    while hole > top and values[first + parent] > value:
        values[first + hole], indices[first + hole] = values[first + parent], indices[first + parent]
        hole = parent
        parent = (hole - 1) // 2
    values[first + hole], indices[first + hole] = value, index


_sift = compiled(_sift, _ROOM)


def _heap_select(values, indices, first, middle, last):
    length = middle - first
    if length >= 2:
        for parent in range((length - 2) // 2, -1, -1):
            _sift(values, indices, first, parent, length, values[first + parent], indices[first + parent])
    for place in range(middle, last):
        if values[place] > values[first]:
            value, index = values[place], indices[place]
            values[place], indices[place] = values[first], indices[first]
            _sift(values, indices, first, 0, length, value, index)


_heap_select = compiled(_heap_select, _ROOM)


def _partition(values, indices, first, last):
    """Partition around the median of three, as `__unguarded_partition_pivot`: the cut."""
    a, b, c = first + 1, first + (last - first) // 2, last - 1
    if values[a] > values[b]:
        median = b if values[b] > values[c] else c if values[a] > values[c] else a
    else:
        median = a if values[a] > values[c] else c if values[b] > values[c] else b
    _swap(values, indices, first, median)
    low, high, pivot = first + 1, last, values[first]
    while True:
        while values[low] > pivot:
            low += 1
        high -= 1
        while pivot > values[high]:
            high -= 1
        if low >= high:
            return low
        _swap(values, indices, low, high)
        low += 1


_partition = compiled(_partition, _ROOM)


def _select(values, indices, count):
    """Move the `count` largest elements of `values` [n], with their `indices`, to the front, in place."""
    first, nth, last = 0, count - 1, len(values)
    if count * _FEW <= last:
        _heap_select(values, indices, 0, count, last)
        return
    depth, length = 0, last
    while length > 1:
        length //= 2
        depth += 2
    while last - first > 3:
        if depth == 0:
            _heap_select(values, indices, first, nth + 1, last)
            _swap(values, indices, first, nth)
            return
        depth -= 1
        cut = _partition(values, indices, first, last)
        if cut <= nth:
            first = cut
        else:
            last = cut
    for place in range(first + 1, last):
        value, index, hole = values[place], indices[place], place
        while hole > first and value > values[hole - 1]:
            values[hole], indices[hole] = values[hole - 1], indices[hole - 1]
            hole -= 1
        values[hole], indices[hole] = value, index


select_largest = compiled(_select, _ROOM)
