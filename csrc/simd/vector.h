// Defines vectors of S3D_VECTOR_BYTES bytes with the vector extension of GCC and Clang.
//
// set.h includes the headers of this folder once per instruction set, inside the set's namespace. They use builtins
// only. A function of the standard library would be compiled here with wide instructions. The linker might keep that
// copy for the whole program, which would then crash on a processor without those instructions.

// Clang's shuffle takes constant indices only. Without AVX2, a permutation is as slow as single entries.
#if defined(__clang__) || S3D_VECTOR_BYTES < 32
#define S3D_CAN_PERMUTE 0
#else
#define S3D_CAN_PERMUTE 1
#endif

#define S3D_INLINE inline __attribute__((always_inline))

template <typename T, int bytes>
struct VectorOf {
    typedef T type __attribute__((vector_size(bytes), aligned(sizeof(T)), may_alias));
};
template <typename T, int bytes = S3D_VECTOR_BYTES>
using Vector = typename VectorOf<T, bytes>::type;

template <typename T>
constexpr int lanes = S3D_VECTOR_BYTES / sizeof(T);

template <typename T, int bytes = S3D_VECTOR_BYTES>
S3D_INLINE Vector<T, bytes> load(const T* from) {
    return *reinterpret_cast<const Vector<T, bytes>*>(from);
}

template <typename T, int bytes = S3D_VECTOR_BYTES>
S3D_INLINE void store(T* to, Vector<T, bytes> value) {
    *reinterpret_cast<Vector<T, bytes>*>(to) = value;
}

template <typename T>
S3D_INLINE Vector<T> broadcast(T value) {
    return value - Vector<T>{};
}

// Vectors of integers of the same size. Comparisons return them.
template <typename T>
using Integers = Vector<Integer<T>>;

template <typename T>
S3D_INLINE Vector<T> select(Integers<T> condition, Vector<T> yes, Vector<T> no) {
    return reinterpret_cast<Vector<T>>((condition & reinterpret_cast<Integers<T>>(yes)) |
                                       (~condition & reinterpret_cast<Integers<T>>(no)));
}

// A NaN in `a` gives NaN. The same holds for `maximum` and `absolute`.
template <typename T>
S3D_INLINE Vector<T> minimum(Vector<T> a, Vector<T> b) {
    return select<T>(a > b, b, a);
}

template <typename T>
S3D_INLINE Vector<T> maximum(Vector<T> a, Vector<T> b) {
    return select<T>(a < b, b, a);
}

template <typename T>
S3D_INLINE Vector<T> absolute(Vector<T> a) {
    return select<T>(a < 0, -a, a);
}
